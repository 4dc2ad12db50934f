#include "faults.hpp"

#include <algorithm>
#include <atomic>

namespace tutti {
namespace {

constexpr std::uint64_t kBlockSize = 4096;
constexpr std::uint32_t kAnyDrive = 0xFFFF;

enum Fault : unsigned { kNone, kError, kZero, kShort, kTorn, kLate, kStall };

}  // namespace

Faults::Faults(const tutti_faults *plan) {
    if (plan) plan_ = *plan;
}

bool Faults::gate_open() const {
    return !plan_->gate || std::atomic_ref(*const_cast<std::uint32_t *>(plan_->gate)).load(std::memory_order_acquire);
}

unsigned Faults::fault(std::uint16_t drive, std::uint64_t block, unsigned operation) const {
    if (block < plan_->begin / kBlockSize || block >= plan_->end / kBlockSize) return kNone;
    std::uint64_t x = plan_->seed + (block * 2 + operation) * 0x9E3779B97F4A7C15 + drive * 0xD1B54A32D192ED03;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    x = (x ^ (x >> 31)) >> 48;
    for (unsigned kind = kError, limit = 0; kind <= kStall; ++kind)
        if (x < (limit += plan_->rates[kind - 1])) return kind;
    return kNone;
}

Verdict Faults::judge(std::uint16_t drive, std::uint64_t segment_size, const Work &work) const {
    if (!plan_) return {};
    const unsigned operation = work.write();
    if ((plan_->drive != kAnyDrive && plan_->drive != drive) || !(plan_->operations >> operation & 1)) return {};
    const std::uint64_t start = work.file->segment * segment_size + work.offset;
    return judge(drive, start + work.moved, start + work.length, operation);
}

Verdict Faults::judge(std::uint16_t drive, std::uint64_t begin, std::uint64_t end, unsigned operation) const {
    Verdict verdict;
    unsigned ending = kNone;
    std::uint64_t ending_block = 0;
    const std::uint64_t first = begin / kBlockSize;
    for (std::uint64_t block = first; block * kBlockSize < end; ++block) {
        const unsigned kind = fault(drive, block, operation);
        if (kind == kStall) verdict.stalls = true;
        if (kind == kLate) verdict.delay_us = plan_->delay_us;
        if (kind == kError) verdict.answer = -plan_->error;
        if ((kind == kZero || kind == kShort || kind == kTorn) && ending == kNone) ending = kind, ending_block = block;
    }
    if (verdict.answer || ending == kNone) return verdict;
    const auto rest = static_cast<std::uint32_t>(std::min((first + 1) * kBlockSize, end) - begin);
    if (ending_block > first)
        verdict.limit = static_cast<std::uint32_t>(ending_block * kBlockSize - begin);
    else if (ending == kShort)
        verdict.limit = rest;
    else
        verdict.answer = ending == kZero ? 0 : static_cast<std::int32_t>(rest);
    return verdict;
}

}  // namespace tutti
