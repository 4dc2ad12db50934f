// What Python sees of this library: plain C functions, called through ctypes. Arrays are C-contiguous, sizes in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#define TUTTI_API extern "C" __attribute__((visibility("default")))

/// Raised with every change of a signature or structure below; kernels/native.py refuses another number.
constexpr std::uint32_t kAbi = 1;

TUTTI_API std::uint32_t tutti_abi() noexcept;

// copy.cpp: rows are (n, T) addresses, `sizes` (T,) > 0; source and destination rows do not overlap.

/// Copy `sizes[t]` bytes from `src[i, t]` to `dst[i, t]`.
TUTTI_API void tutti_copy_rows(const std::uint64_t *dst, const std::uint64_t *src, const std::uint64_t *sizes, std::size_t n,
                               std::size_t tensors) noexcept;

/// The same, and the tensor checksums of the very bytes that were copied to `out` (n, T).
TUTTI_API void tutti_copy_and_sum(const std::uint64_t *dst, const std::uint64_t *src, const std::uint64_t *sizes, std::size_t n,
                                  std::size_t tensors, std::uint64_t *out) noexcept;

/// Tensor checksums without a copy.
TUTTI_API void tutti_sums(const std::uint64_t *rows, const std::uint64_t *sizes, std::size_t n, std::size_t tensors,
                          std::uint64_t *out) noexcept;

/// XXH3-64 of each row of `table` (n, T) to `out` (n,).
TUTTI_API void tutti_roots(const std::uint64_t *table, std::size_t n, std::size_t tensors, std::uint64_t *out) noexcept;

/// XXH3-64 of `size` bytes.
TUTTI_API std::uint64_t tutti_xxh3(const void *data, std::size_t size) noexcept;
