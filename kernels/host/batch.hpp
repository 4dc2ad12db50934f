// One submitted batch: its I/O contexts ordered by drive, their results, and somebody who waits for the last one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "abi.hpp"

namespace tutti {

/// Nanoseconds of CLOCK_MONOTONIC, Python's time.monotonic().
std::int64_t now_ns();

class Batch {
  public:
    struct Item {
        std::uint64_t address, offset;
        std::uint32_t length;
        std::uint32_t index;   // place in the caller's array
        std::uint32_t pieces;  // transfers that have not ended: more than one where length > max_io
        std::int32_t error;    // of a piece, or 0
        std::uint32_t tag;     // the caller's own
        std::uint8_t operation;
        bool ended;  // nothing more of it starts
    };

    /// Consecutive items of one drive.
    struct Part {
        std::uint16_t drive;
        std::uint32_t begin, end;
    };

    Batch(std::span<const tutti_ioctx> contexts, unsigned klass, std::int64_t deadline_ns, std::uint32_t max_io);

    /// `count` pieces of `item` have ended, with `error` (0 or -errno). Each piece ends once; any thread.
    void settle(std::uint32_t item, std::uint32_t count, std::int32_t error);

    /// Sleep until the last item is done or the clock reaches `until_ns`. True when done.
    bool wait(std::int64_t until_ns);
    bool done() const { return done_.load(std::memory_order_acquire) != 0; }

    /// (n,) bytes, -errno or -EINPROGRESS, in the caller's order. True when all are final.
    bool results(std::int32_t *out) const;

    /// Add to `moved`: its contexts and bytes by drive, and those contexts that are not moved whole. True when all are final.
    bool account(tutti_moved &moved) const;

    const unsigned klass;
    const std::int64_t deadline_ns;
    const std::uint32_t max_io;  // bytes of one transfer
    std::vector<Item> items;
    std::vector<Part> parts;

  private:
    mutable std::vector<std::int32_t> results_;
    std::atomic<std::uint32_t> pending_;
    std::atomic<std::uint32_t> done_ = 0;  // a futex: 0 until the last item is done
};

}  // namespace tutti
