// Every variant of the block pass equals the definition, at any alignment, and touches no byte beyond its rows.

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "../abi.hpp"
#include "../blocks.hpp"
#include "../xxh3.hpp"
#include "check.hpp"

using namespace tutti;

namespace {

std::uint64_t by_definition(const unsigned char *block) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < kWords; ++i) {
        std::uint64_t word;
        std::memcpy(&word, block + 8 * i, 8);
        const std::uint64_t key = word ^ kKeys[i];
        sum += static_cast<std::uint64_t>(static_cast<std::uint32_t>(key)) * static_cast<std::uint32_t>(key >> 32) + word;
    }
    return sum;
}

void variants_agree() {
    std::mt19937_64 random(1);
    constexpr std::size_t blocks = 3, size = blocks * kBlock;
    for (const auto &kernel : block_kernels())
        for (std::size_t shift : {0, 1, 8, 31, 32, 63})
            for (std::size_t target : {0, 1, 16, 32}) {
                std::vector<unsigned char> from(size + 64), to(size + 64, 0xAA);
                for (auto &byte : from) byte = static_cast<unsigned char>(random());
                std::uint64_t sums[blocks] = {}, alone[blocks] = {};
                kernel.sum(to.data() + target, from.data() + shift, blocks, sums);
                finish_blocks();
                CHECK(!std::memcmp(to.data() + target, from.data() + shift, size));
                for (std::size_t at = 0; at < to.size(); ++at) CHECK((at >= target && at < target + size) || to[at] == 0xAA);
                kernel.sum(nullptr, from.data() + shift, blocks, alone);
                for (std::size_t block = 0; block < blocks; ++block) {
                    CHECK(sums[block] == by_definition(from.data() + shift + block * kBlock));
                    CHECK(alone[block] == sums[block]);
                }
                for (const std::size_t part : {1ul, 63ul, 64ul, 2048ul, size - 1, size}) {
                    std::fill(to.begin(), to.end(), 0xAA);
                    kernel.copy(to.data() + target, from.data() + shift, part);
                    finish_blocks();
                    CHECK(!std::memcmp(to.data() + target, from.data() + shift, part));
                    for (std::size_t at = 0; at < to.size(); ++at) CHECK((at >= target && at < target + part) || to[at] == 0xAA);
                }
            }
}

void rows_of_any_size() {  // exact allocations: the address sanitizer sees a byte too many
    std::mt19937_64 random(2);
    for (std::uint64_t size : {1, 7, 511, 4095, 4096, 4097, 8191, 12288, 20000}) {
        std::vector<unsigned char> from(size), to(size), whole(size + kBlock);
        for (auto &byte : from) byte = static_cast<unsigned char>(random());
        std::memcpy(whole.data(), from.data(), size);
        const std::uint64_t src = reinterpret_cast<std::uint64_t>(from.data()), dst = reinterpret_cast<std::uint64_t>(to.data());
        std::uint64_t sum = 0, alone = 0;
        tutti_copy_and_sum(&dst, &src, &size, 1, 1, &sum);
        tutti_sums(&src, &size, 1, 1, &alone);
        std::vector<std::uint64_t> list;
        for (std::size_t at = 0; at < size; at += kBlock) list.push_back(by_definition(whole.data() + at));
        list.push_back(size);
        CHECK(to == from && sum == alone && sum == xxh3_64(list.data(), 8 * list.size()));
        std::fill(to.begin(), to.end(), 0);
        tutti_copy_rows(&dst, &src, &size, 1, 1);
        CHECK(to == from);
    }
}

}  // namespace

int main() {
    variants_agree();
    rows_of_any_size();
}
