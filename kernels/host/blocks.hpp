// Sums of whole 4 KiB blocks, alone or with a copy of them in the same pass, and copies of any size. tutti_sglang/checksum.py is the reference.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tutti {

constexpr std::size_t kBlock = 4096, kWords = kBlock / 8;

/// The 512 key words: SplitMix64 from a seed that spells TUTTI.
consteval std::array<std::uint64_t, kWords> make_keys() {
    std::array<std::uint64_t, kWords> keys{};
    std::uint64_t state = 0x5455545449;
    for (auto &key : keys) {
        std::uint64_t z = state += 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        key = z ^ (z >> 31);
    }
    return keys;
}
alignas(64) inline constexpr std::array<std::uint64_t, kWords> kKeys = make_keys();

struct BlockKernel {
    const char *name;
    /// Put the sums of `count` blocks at `src` into `sums`, and copy the blocks to `dst` unless it is null.
    void (*sum)(unsigned char *dst, const unsigned char *src, std::size_t count, std::uint64_t *sums);
    void (*copy)(unsigned char *dst, const unsigned char *src, std::size_t size);
};

/// The variants that this CPU runs, slowest first.
std::span<const BlockKernel> block_kernels();

/// Stores of the copy may have gone around the caches: order them before whatever tells others that the bytes are there.
void finish_blocks();

}  // namespace tutti
