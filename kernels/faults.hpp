// The fault seam of tests, below both native engines: a drive with bad blocks, as tutti_sglang/testing/faults.py defines it (which says what
// each kind does).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

namespace tutti {

/// PACKED_DTYPE of testing/faults.py.
struct FaultPlan {
    std::uint64_t seed, begin, end;
    const std::uint32_t *gate;
    std::uint32_t rates[6], drive, operations;
    std::int32_t error;
    std::uint32_t delay_us;
};
static_assert(sizeof(FaultPlan) == 72);

/// What a system call on some bytes of a drive meets.
struct Verdict {
    bool stalls = false;                 // wait for the gate
    std::uint32_t delay_us = 0;          // then this long
    std::optional<std::int32_t> answer;  // then no call is made: this is its result
    std::uint32_t limit = UINT32_MAX;    // else the call moves at most so many bytes
};

class Faults {
  public:
    static constexpr std::uint32_t kPollUs = 1000;
    static constexpr std::int64_t kStallNs = 600'000'000'000;

    Faults() = default;
    /// `plan` may be null; it is copied.
    explicit Faults(const FaultPlan *plan) {
        if (plan) plan_ = *plan;
    }

    bool gate_open() const {
        return !plan_->gate || std::atomic_ref(*const_cast<std::uint32_t *>(plan_->gate)).load(std::memory_order_acquire);
    }

    /// Of a call on the bytes from `begin` to `end` of a drive.
    Verdict judge(std::uint16_t drive, std::uint64_t begin, std::uint64_t end, bool write) const {
        Verdict verdict;
        if (!plan_ || (plan_->drive != kAnyDrive && plan_->drive != drive) || !(plan_->operations >> write & 1)) return verdict;
        unsigned ending = kNone;
        std::uint64_t ending_block = 0;
        const std::uint64_t first = begin / kBlockSize;
        for (std::uint64_t block = first; block * kBlockSize < end; ++block) {
            const unsigned kind = fault(drive, block, write);
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

  private:
    static constexpr std::uint64_t kBlockSize = 4096;
    static constexpr std::uint32_t kAnyDrive = 0xFFFF;
    enum Fault : unsigned { kNone, kError, kZero, kShort, kTorn, kLate, kStall };

    unsigned fault(std::uint16_t drive, std::uint64_t block, unsigned operation) const {
        if (block < plan_->begin / kBlockSize || block >= plan_->end / kBlockSize) return kNone;
        std::uint64_t x = plan_->seed + (block * 2 + operation) * 0x9E3779B97F4A7C15 + drive * 0xD1B54A32D192ED03;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
        x = (x ^ (x >> 31)) >> 48;
        for (unsigned kind = kError, limit = 0; kind <= kStall; ++kind)
            if (x < (limit += plan_->rates[kind - 1])) return kind;
        return kNone;
    }

    std::optional<FaultPlan> plan_;
};

}  // namespace tutti
