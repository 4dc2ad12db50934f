// Where pages of a host pool lie: short arithmetic that numpy would do with the GIL given away in between.

#include "abi.hpp"

int tutti_pages(const std::int64_t *slots, std::size_t pages, std::int64_t page_size, std::int64_t end, std::int64_t *out) noexcept {
    for (std::size_t page = 0; page < pages; ++page, slots += page_size) {
        const std::int64_t first = slots[0];
        if (first < 0 || first >= end * page_size || first % page_size) return 0;
        for (std::int64_t i = 1; i < page_size; ++i)
            if (slots[i] != first + i) return 0;
        out[page] = first / page_size;
    }
    return 1;
}

void tutti_page_rows(const std::int64_t *pages, std::size_t n, const std::uint64_t *base, const std::uint64_t *stride,
                     std::size_t tensors, std::uint64_t *out) noexcept {
    for (std::size_t page = 0; page < n; ++page)
        for (std::size_t t = 0; t < tensors; ++t) *out++ = base[t] + static_cast<std::uint64_t>(pages[page]) * stride[t];
}
