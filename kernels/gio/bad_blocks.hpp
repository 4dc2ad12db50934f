// A drive with bad blocks below the controller, as tutti_sglang/testing/faults.py defines it (which says what each kind does).
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <vector>

#include "platform.cuh"

namespace tutti::gio {

// PACKED_DTYPE of testing/faults.py.
struct FaultPlan {
    u64 seed, begin, end, gate;
    u32 rates[6], drive, operations;
    i32 error;
    u32 delay_us;
};
static_assert(sizeof(FaultPlan) == 72);

class BadBlocks {
public:
    BadBlocks() = default;
    BadBlocks(const FaultPlan& plan, u32 drive) : plan_(plan), drive_(drive) {}

    // Waits as the blocks from byte `from` to `to` of the drive demand, and cuts `pieces` to what may move. The call's result if none is made.
    std::optional<i32> meet(u64 from, u64 to, bool write, std::vector<iovec>& pieces) const {
        if (!concerns(write)) return std::nullopt;
        u32 first = kNone;  // of the kinds that end a call
        u64 end = 0;
        bool stalls = false, late = false, fails = false;
        for (u64 block = from / kBlock; block * kBlock < to; ++block) {
            Kind kind = kind_of(block, write);
            stalls |= kind == kStall;
            late |= kind == kLate;
            fails |= kind == kError;
            if ((kind == kZero || kind == kShort || kind == kTorn) && first == kNone) {
                first = kind;
                end = block;
            }
        }
        for (u64 until = now_ns() + kStallNs; stalls && !gate_open() && now_ns() < until;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (late) std::this_thread::sleep_for(std::chrono::microseconds(plan_->delay_us));
        if (fails) return -plan_->error;
        if (first == kNone) return std::nullopt;
        u64 rest = std::min((from / kBlock + 1) * kBlock, to) - from;  // of the first block
        if (end == from / kBlock && first == kZero) return 0;
        if (end == from / kBlock && first == kTorn) return static_cast<i32>(rest);
        cut(pieces, end == from / kBlock ? rest : end * kBlock - from);
        return std::nullopt;
    }

private:
    enum Kind : u32 { kNone, kError, kZero, kShort, kTorn, kLate, kStall };
    static constexpr u64 kBlock = 4096, kStallNs = 600000000000ull;
    static constexpr u32 kAnyDrive = 0xffff;

    bool concerns(bool write) const {
        return plan_ && (plan_->drive == kAnyDrive || plan_->drive == drive_) && plan_->operations >> (write ? 1 : 0) & 1;
    }

    bool gate_open() const { return !plan_->gate || SystemRef<u32>(*reinterpret_cast<u32*>(plan_->gate)).load(acquire); }

    Kind kind_of(u64 block, bool write) const {
        if (block < plan_->begin / kBlock || block >= plan_->end / kBlock) return kNone;
        u64 x = plan_->seed + (block * 2 + (write ? 1 : 0)) * 0x9E3779B97F4A7C15ull + drive_ * 0xD1B54A32D192ED03ull;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ x >> 27) * 0x94D049BB133111EBull;
        x = (x ^ x >> 31) >> 48;
        u64 limit = 0;
        for (u32 kind = kError; kind <= kStall; ++kind)
            if (x < (limit += plan_->rates[kind - 1])) return static_cast<Kind>(kind);
        return kNone;
    }

    static void cut(std::vector<iovec>& pieces, u64 size) {
        size_t kept = 0;
        for (; kept < pieces.size() && size; ++kept) {
            pieces[kept].iov_len = std::min<size_t>(pieces[kept].iov_len, size);
            size -= pieces[kept].iov_len;
        }
        pieces.resize(kept);
    }

    std::optional<FaultPlan> plan_;
    u64 drive_ = 0;
};

}  // namespace tutti::gio
