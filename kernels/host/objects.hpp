// Where the tensors of objects lie on the drives: the arithmetic of tutti_sglang/geometry.py on its tables.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.hpp"

namespace tutti {

class Planner {
  public:
    Planner(const tutti_objects &objects, std::uint64_t segment_size);

    /// Bytes that the tensors of one object take in staging.
    std::uint64_t object_size() const { return object_size_; }

    /// The objects in the order of their places on the drives.
    std::vector<std::uint32_t> order() const;

    /// Add the contexts of an object that lies at `base` in staging, or of which each tensor lies at its place in `rows`.
    void add(std::vector<tutti_ioctx> &contexts, std::uint32_t object, std::uint64_t base, std::uint8_t operation, std::uint8_t klass,
             const std::uint64_t *rows = nullptr) const;

  private:
    const tutti_objects &objects_;
    const std::uint64_t segment_size_;
    std::vector<std::uint64_t> starts_;
    std::uint64_t object_size_ = 0;
};

/// By drive and offset: neighbours become one transfer.
void sort_by_place(std::vector<tutti_ioctx> &contexts);

}  // namespace tutti
