// Rows of memory, copied and summed: staging ⇄ SGLang's host pool (DESIGN §4.4).

#include <algorithm>
#include <cstring>

#include "abi.hpp"
#include "blocks.hpp"
#include "rows.hpp"
#include "xxh3.hpp"

using u64 = std::uint64_t;

namespace tutti {
namespace {

const BlockKernel &fastest() {
    static const BlockKernel &kernel = block_kernels().back();
    return kernel;
}

}  // namespace

void copy_row(unsigned char *dst, const unsigned char *src, std::size_t size) { fastest().copy(dst, src, size); }

Summer::Summer(const u64 *sizes, std::size_t tensors)
    : list_((tensors ? *std::max_element(sizes, sizes + tensors) : 0) / kBlock + 2) {}

u64 Summer::operator()(unsigned char *dst, const unsigned char *src, std::size_t size) {
    std::size_t blocks = size / kBlock;
    if (blocks) fastest().sum(dst, src, blocks, list_.data());
    if (const std::size_t whole = blocks * kBlock; whole < size) {
        alignas(64) unsigned char padded[kBlock] = {};
        std::memcpy(padded, src + whole, size - whole);
        fastest().sum(nullptr, padded, 1, &list_[blocks++]);
        if (dst) std::memcpy(dst + whole, padded, size - whole);  // from the copy that was summed: the source may change meanwhile
    }
    list_[blocks] = size;
    return xxh3_64(list_.data(), 8 * (blocks + 1));
}

}  // namespace tutti

using namespace tutti;

std::uint32_t tutti_abi() noexcept { return kAbi; }

void tutti_copy_rows(const u64 *dst, const u64 *src, const u64 *sizes, std::size_t n, std::size_t tensors) noexcept {
    for (std::size_t row = 0; row < n * tensors; ++row) copy_row(memory(dst[row]), memory(src[row]), sizes[row % tensors]);
    finish_blocks();
}

void tutti_copy_and_sum(const u64 *dst, const u64 *src, const u64 *sizes, std::size_t n, std::size_t tensors, u64 *out) noexcept {
    Summer sum(sizes, tensors);
    for (std::size_t row = 0; row < n * tensors; ++row) out[row] = sum(memory(dst[row]), memory(src[row]), sizes[row % tensors]);
    finish_blocks();
}

void tutti_sums(const u64 *rows, const u64 *sizes, std::size_t n, std::size_t tensors, u64 *out) noexcept {
    Summer sum(sizes, tensors);
    for (std::size_t row = 0; row < n * tensors; ++row) out[row] = sum(nullptr, memory(rows[row]), sizes[row % tensors]);
}

void tutti_roots(const u64 *table, std::size_t n, std::size_t tensors, u64 *out) noexcept {
    for (std::size_t row = 0; row < n; ++row) out[row] = xxh3_64(table + row * tensors, 8 * tensors);
}

u64 tutti_xxh3(const void *data, std::size_t size) noexcept { return xxh3_64(data, size); }
