#include "blocks.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tutti {
namespace {

/// Rows are seldom in a cache and hardware prefetchers start anew at each 4 KiB page; 1 KiB ahead was best (8 → 13 GB/s for sums alone).
constexpr std::size_t kAhead = 1024;

template <bool copies>
void sum_portable(unsigned char *dst, const unsigned char *src, std::size_t count, std::uint64_t *sums) {
    for (std::size_t block = 0; block < count; ++block, src += kBlock) {
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < kWords; ++i) {
            if (i % 8 == 0) __builtin_prefetch(src + 8 * i + kAhead);
            std::uint64_t word;
            std::memcpy(&word, src + 8 * i, 8);
            if constexpr (copies) std::memcpy(dst + 8 * i, &word, 8);
            const std::uint64_t key = word ^ kKeys[i];
            sum += (key & 0xFFFFFFFF) * (key >> 32) + word;
        }
        sums[block] = sum;
        if constexpr (copies) dst += kBlock;
    }
}

void copy_portable(unsigned char *dst, const unsigned char *src, std::size_t size) { std::memcpy(dst, src, size); }

#if defined(__x86_64__)

// Streaming stores save the read of each line that is about to be overwritten, half of the traffic of a copy (4 -> 10 GB/s, pieces of
// 2 KiB 2 -> 4); they need an aligned target.
bool streams_to(const unsigned char *dst) { return reinterpret_cast<std::uintptr_t>(dst) % 32 == 0; }

enum class Store { none, cached, streamed };

template <Store store>
__attribute__((target("avx2"))) void sum_blocks(unsigned char *dst, const unsigned char *src, std::size_t count, std::uint64_t *sums) {
    for (std::size_t block = 0; block < count; ++block, src += kBlock) {
        __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (std::size_t at = 0; at < kBlock; at += 64) {
            _mm_prefetch(reinterpret_cast<const char *>(src + at + kAhead), _MM_HINT_T0);
            for (std::size_t half = 0; half < 2; ++half) {
                const std::size_t here = at + 32 * half;
                const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src + here));
                if constexpr (store == Store::streamed) _mm256_stream_si256(reinterpret_cast<__m256i *>(dst + here), word);
                if constexpr (store == Store::cached) _mm256_storeu_si256(reinterpret_cast<__m256i *>(dst + here), word);
                const __m256i key = _mm256_xor_si256(word, _mm256_load_si256(reinterpret_cast<const __m256i *>(&kKeys[here / 8])));
                const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
                sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, word));
            }
        }
        alignas(32) std::uint64_t lanes[4];
        _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), _mm256_add_epi64(sum[0], sum[1]));
        sums[block] = lanes[0] + lanes[1] + lanes[2] + lanes[3];
        if constexpr (store != Store::none) dst += kBlock;
    }
}

template <bool copies>
void sum_avx2(unsigned char *dst, const unsigned char *src, std::size_t count, std::uint64_t *sums) {
    if constexpr (!copies) return sum_blocks<Store::none>(dst, src, count, sums);
    (streams_to(dst) ? sum_blocks<Store::streamed> : sum_blocks<Store::cached>)(dst, src, count, sums);
}

__attribute__((target("avx2"))) void copy_avx2(unsigned char *dst, const unsigned char *src, std::size_t size) {
    const std::size_t whole = streams_to(dst) ? size / 64 * 64 : 0;
    for (std::size_t at = 0; at < whole; at += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(src + at + kAhead), _MM_HINT_T0);
        for (std::size_t here = at; here < at + 64; here += 32) {
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src + here));
            _mm256_stream_si256(reinterpret_cast<__m256i *>(dst + here), word);
        }
    }
    std::memcpy(dst + whole, src + whole, size - whole);
}

#elif defined(__aarch64__)

template <bool copies>
void sum_neon(unsigned char *dst, const unsigned char *src, std::size_t count, std::uint64_t *sums) {
    for (std::size_t block = 0; block < count; ++block, src += kBlock) {
        uint64x2_t products = vdupq_n_u64(0), words = vdupq_n_u64(0);
        for (std::size_t at = 0; at < kBlock; at += 16) {
            if (at % 64 == 0) __builtin_prefetch(src + at + kAhead);
            const uint64x2_t word = vreinterpretq_u64_u8(vld1q_u8(src + at));
            if constexpr (copies) vst1q_u8(dst + at, vreinterpretq_u8_u64(word));
            const uint64x2_t key = veorq_u64(word, vld1q_u64(&kKeys[at / 8]));
            products = vmlal_u32(products, vmovn_u64(key), vshrn_n_u64(key, 32));
            words = vaddq_u64(words, word);
        }
        sums[block] = vaddvq_u64(vaddq_u64(products, words));
        if constexpr (copies) dst += kBlock;
    }
}

#endif

/// Whether there is a copy is asked once per row, not in the loop.
template <auto with_copy, auto alone>
void choose(unsigned char *dst, const unsigned char *src, std::size_t count, std::uint64_t *sums) {
    (dst ? with_copy : alone)(dst, src, count, sums);
}

constexpr BlockKernel kKernels[] = {
    {"portable", choose<sum_portable<true>, sum_portable<false>>, copy_portable},
#if defined(__x86_64__)
    {"avx2", choose<sum_avx2<true>, sum_avx2<false>>, copy_avx2},  // AVX-512 was tried and is no faster: memory is the limit
#elif defined(__aarch64__)
    {"neon", choose<sum_neon<true>, sum_neon<false>>, copy_portable},
#endif
};

}  // namespace

std::span<const BlockKernel> block_kernels() {
    static const std::span<const BlockKernel> known = [] {
        std::span<const BlockKernel> all{kKernels};
#if defined(__x86_64__)
        if (!__builtin_cpu_supports("avx2")) return all.first(1);
#endif
        return all;
    }();
    return known;
}

void finish_blocks() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace tutti
