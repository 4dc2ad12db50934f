// Marks of keys, and where the index's table has them: short work that numpy would do with the GIL given away in between.

#include <algorithm>

#include "abi.hpp"
#include "xxh3.hpp"

namespace {

constexpr std::size_t kFetched = 16;  // marks whose memory is on its way while one is looked at

}  // namespace

void tutti_marks(std::uint32_t name, const std::uint8_t *keys, std::size_t n, std::uint64_t *out) noexcept {
    struct {
        std::uint64_t name;
        std::uint8_t key[32];
    } row{name, {}};
    static_assert(sizeof(row) == 40);
    for (std::size_t i = 0; i < n; ++i) {
        std::copy_n(keys + 32 * i, 32, row.key);
        out[i] = tutti::xxh3_64(&row, sizeof(row));
    }
}

void tutti_find(const tutti_table *table, const std::int64_t *marks, std::size_t n, std::int64_t absent, std::int64_t *out) noexcept {
    const auto bucket = [table](std::int64_t mark) { return table->starts + (mark >> table->shift) + (std::int64_t{1} << (63 - table->shift)); };
    for (std::size_t i = 0; i < n + 2 * kFetched; ++i) {
        if (i < n) __builtin_prefetch(bucket(marks[i]));
        if (i >= kFetched && i - kFetched < n) __builtin_prefetch(table->marks + *bucket(marks[i - kFetched]));
        if (i < 2 * kFetched) continue;
        const std::size_t at = i - 2 * kFetched;
        const std::int64_t *range = bucket(marks[at]);
        const std::int64_t *last = table->marks + range[1], *found = std::lower_bound(table->marks + range[0], last, marks[at]);
        out[at] = found != last && *found == marks[at] ? table->slots[found - table->marks] : absent;
    }
}
