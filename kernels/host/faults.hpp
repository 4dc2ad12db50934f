// The fault seam of tests: a drive with bad blocks, as tutti_sglang/testing/faults.py defines it.
#pragma once

#include <cstdint>
#include <optional>

#include "queue.hpp"

namespace tutti {

/// What a system call on some bytes of a drive meets.
struct Verdict {
    bool stalls = false;                    // wait for the gate
    std::uint32_t delay_us = 0;             // then this long
    std::optional<std::int32_t> answer;     // then no call is made: this is its result
    std::uint32_t limit = UINT32_MAX;       // else the call moves at most so many bytes
};

class Faults {
  public:
    static constexpr std::uint32_t kPollUs = 1000;
    static constexpr std::int64_t kStallNs = 600'000'000'000;

    /// `plan` may be null; it is copied.
    explicit Faults(const tutti_faults *plan);
    Verdict judge(std::uint16_t drive, std::uint64_t segment_size, const Work &work) const;
    bool gate_open() const;

  private:
    unsigned fault(std::uint16_t drive, std::uint64_t block, unsigned operation) const;
    Verdict judge(std::uint16_t drive, std::uint64_t begin, std::uint64_t end, unsigned operation) const;

    std::optional<tutti_faults> plan_;
};

}  // namespace tutti
