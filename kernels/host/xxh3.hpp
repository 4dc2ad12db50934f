// XXH3-64 (seed 0, default secret), written from its specification: the hash of a short list of block sums.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(std::endian::native == std::endian::little, "words on disk and in IOCTX are little-endian");

namespace tutti {

namespace xxh3 {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using Bytes = const unsigned char *;

constexpr u64 kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr u64 kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr u64 kMix1 = 0x165667919E3779F9, kMix2 = 0x9FB21C651E98DF25;

constexpr std::size_t kStripe = 64, kSecretStep = 8, kSecretSize = 192, kSecretMin = 136;

inline constexpr unsigned char kSecret[kSecretSize] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline u32 read32(Bytes p) {
    u32 value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

inline u64 read64(Bytes p) {
    u64 value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

/// The two halves of the 128-bit product, folded by xor.
inline u64 fold(u64 a, u64 b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

inline u64 avalanche(u64 h) {
    h = (h ^ (h >> 37)) * kMix1;
    return h ^ (h >> 32);
}

inline u64 avalanche64(u64 h) {
    h = (h ^ (h >> 33)) * kPrime64_2;
    h = (h ^ (h >> 29)) * kPrime64_3;
    return h ^ (h >> 32);
}

inline u64 mix16(Bytes p, Bytes secret) { return fold(read64(p) ^ read64(secret), read64(p + 8) ^ read64(secret + 8)); }

inline u64 hash_to_16(Bytes p, std::size_t n) {
    if (n > 8) {
        const u64 low = read64(p) ^ read64(kSecret + 24) ^ read64(kSecret + 32);
        const u64 high = read64(p + n - 8) ^ read64(kSecret + 40) ^ read64(kSecret + 48);
        return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (n >= 4) {
        u64 h = (read32(p + n - 4) + (static_cast<u64>(read32(p)) << 32)) ^ read64(kSecret + 8) ^ read64(kSecret + 16);
        h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
        h *= kMix2;
        h ^= (h >> 35) + n;
        h *= kMix2;
        return h ^ (h >> 28);
    }
    if (n > 0) {
        const u32 word = (static_cast<u32>(p[0]) << 16) | (static_cast<u32>(p[n >> 1]) << 24) | p[n - 1] | (static_cast<u32>(n) << 8);
        return avalanche64(word ^ (read32(kSecret) ^ read32(kSecret + 4)));
    }
    return avalanche64(read64(kSecret + 56) ^ read64(kSecret + 64));
}

inline u64 hash_to_128(Bytes p, std::size_t n) {
    u64 h = n * kPrime64_1;
    for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;)
        h += mix16(p + 16 * i, kSecret + 32 * i) + mix16(p + n - 16 * (i + 1), kSecret + 32 * i + 16);
    return avalanche(h);
}

inline u64 hash_to_240(Bytes p, std::size_t n) {
    u64 h = n * kPrime64_1;
    for (std::size_t i = 0; i < 8; ++i) h += mix16(p + 16 * i, kSecret + 16 * i);
    h = avalanche(h);
    for (std::size_t i = 8; i < n / 16; ++i) h += mix16(p + 16 * i, kSecret + 16 * (i - 8) + 3);
    return avalanche(h + mix16(p + n - 16, kSecret + kSecretMin - 17));
}

inline void accumulate(u64 (&lanes)[8], Bytes p, Bytes secret) {
    for (int i = 0; i < 8; ++i) {
        const u64 word = read64(p + 8 * i), key = word ^ read64(secret + 8 * i);
        lanes[i ^ 1] += word;
        lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

inline void scramble(u64 (&lanes)[8]) {
    for (int i = 0; i < 8; ++i) {
        lanes[i] ^= lanes[i] >> 47;
        lanes[i] = (lanes[i] ^ read64(kSecret + kSecretSize - kStripe + 8 * i)) * kPrime32_1;
    }
}

inline u64 hash_long(Bytes p, std::size_t n) {
    u64 lanes[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    constexpr std::size_t per_block = (kSecretSize - kStripe) / kSecretStep;
    for (std::size_t stripe = 0; stripe < (n - 1) / kStripe; ++stripe) {
        accumulate(lanes, p + kStripe * stripe, kSecret + kSecretStep * (stripe % per_block));
        if (stripe % per_block == per_block - 1) scramble(lanes);
    }
    accumulate(lanes, p + n - kStripe, kSecret + kSecretSize - kStripe - 7);
    u64 h = n * kPrime64_1;
    for (int i = 0; i < 4; ++i) {
        const Bytes secret = kSecret + 11 + 16 * i;
        h += fold(lanes[2 * i] ^ read64(secret), lanes[2 * i + 1] ^ read64(secret + 8));
    }
    return avalanche(h);
}

}  // namespace xxh3

/// XXH3-64 of `size` bytes, as `xxhash.xxh3_64_intdigest`.
inline std::uint64_t xxh3_64(const void *data, std::size_t size) {
    const auto *p = static_cast<const unsigned char *>(data);
    if (size <= 16) return xxh3::hash_to_16(p, size);
    if (size <= 128) return xxh3::hash_to_128(p, size);
    if (size <= 240) return xxh3::hash_to_240(p, size);
    return xxh3::hash_long(p, size);
}

}  // namespace tutti
