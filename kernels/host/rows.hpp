// One row at a time: its copy, its tensor checksum, or both in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tutti {

inline unsigned char *memory(std::uint64_t address) { return reinterpret_cast<unsigned char *>(static_cast<std::uintptr_t>(address)); }

/// Call finish_blocks() after the last one.
void copy_row(unsigned char *dst, const unsigned char *src, std::size_t size);

/// Checksums one tensor after the other, with one scratch list for all.
class Summer {
  public:
    /// For tensors of (T,) `sizes`.
    Summer(const std::uint64_t *sizes, std::size_t tensors);

    /// The checksum of `size` bytes at `src`, which are copied to `dst` unless that is null; call finish_blocks() after the last one.
    std::uint64_t operator()(unsigned char *dst, const unsigned char *src, std::size_t size);

  private:
    std::vector<std::uint64_t> list_;
};

}  // namespace tutti
