#include "objects.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace tutti {
namespace {

/// Geometry.packed, taken apart.
struct Map {
    explicit Map(const std::uint64_t *packed)
        : group(packed[0]), positions(packed[1]), tensors(packed[2]), period(packed[3]), by_tensor(packed[4]), cycle(packed + 5),
          bases(cycle + positions), table(bases + positions), strides(table + positions * tensors) {}

    const std::uint64_t group, positions, tensors, period, by_tensor;
    const std::uint64_t *const cycle, *const bases, *const table, *const strides;
};

}  // namespace

Planner::Planner(const tutti_objects &objects, std::uint64_t segment_size) : objects_(objects), segment_size_(segment_size) {}

std::vector<std::uint32_t> Planner::order() const {
    std::vector<std::uint32_t> order(objects_.count);
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::sort(order, {}, [this](std::uint32_t i) {
        return std::tuple(objects_.segments[objects_.places[i]], objects_.numbers[i], i);
    });
    return order;
}

void Planner::add(std::vector<tutti_ioctx> &contexts, std::uint32_t object, const std::uint64_t *rows, std::uint8_t operation,
                  std::uint8_t klass) const {
    const std::uint32_t place = objects_.places[object];
    const Map map(objects_.maps[place]);
    const std::uint64_t group = objects_.numbers[object] / map.group, within = objects_.numbers[object] % map.group;
    const std::uint64_t start = objects_.segments[place] * segment_size_ + group / map.positions * map.period;
    const std::uint64_t *const offsets = map.table + group % map.positions * map.tensors;
    for (std::uint64_t i = 0; i < objects_.tensor_count; ++i) {
        const std::uint64_t tensor = objects_.tensors[i], stride = map.strides[tensor];
        const std::uint64_t position = (group + (map.by_tensor ? tensor : 0)) % map.positions;
        contexts.push_back({rows ? rows[i] : 0, start + map.bases[position] + offsets[tensor] + within * stride,
                            static_cast<std::uint32_t>(stride), 0, static_cast<std::uint16_t>(map.cycle[position]), operation, klass,
                            object});
    }
}

void sort_by_place(std::vector<tutti_ioctx> &contexts) {
    std::ranges::sort(contexts, {}, [](const tutti_ioctx &each) { return std::tuple(each.drive, each.offset, each.tag); });
}

}  // namespace tutti
