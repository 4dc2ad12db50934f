// Where the tensors of objects lie on the drives: the arithmetic of tutti_sglang/geometry.py on its tables.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.hpp"

namespace tutti {

class Planner {
  public:
    Planner(const tutti_objects &objects, std::uint64_t segment_size);

    /// The objects in the order of their places on the drives.
    std::vector<std::uint32_t> order() const;

    /// Add the contexts of an object whose tensors lie at (t,) `rows`; null: that is not known yet.
    void add(std::vector<tutti_ioctx> &contexts, std::uint32_t object, const std::uint64_t *rows, std::uint8_t operation,
             std::uint8_t klass) const;

  private:
    const tutti_objects &objects_;
    const std::uint64_t segment_size_;
};

/// By drive and offset: neighbours become one transfer.
void sort_by_place(std::vector<tutti_ioctx> &contexts);

}  // namespace tutti
