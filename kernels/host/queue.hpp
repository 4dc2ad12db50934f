// What waits for one drive and in which order it starts: bookkeeping under one lock, shared by the ring and the thread pool.
#pragma once

#include <sys/uio.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "batch.hpp"

namespace tutti {

constexpr unsigned kClasses = 3;  // IoClass: demand, preload, write

/// Pieces of memory of one transfer (the system's limit is 1024): 1 MiB of the smallest tensors.
constexpr unsigned kMaxIovecs = 256;

/// A segment's file on this drive.
struct File {
    std::uint32_t segment;
    int fd;
    unsigned in_flight = 0;
    int slot = -1;  // among the ring's registered files; the ring's thread alone uses it until the last transfer has ended
};

/// One transfer on its way: IOCTX that are adjacent on the drive, or a piece of a large one.
struct Work {
    std::shared_ptr<Batch> batch;
    File *file;
    std::uint64_t offset;        // in the file, where the transfer starts
    std::uint32_t first, count;  // the IOCTX in it
    std::uint32_t end;           // after a failure those up to here are tried again, one by one
    std::uint32_t skip;          // bytes of items[first] before this piece
    std::uint32_t length;        // bytes
    std::uint32_t moved = 0;     // bytes that have arrived
    std::uint32_t attempts = 0;  // system calls that were only interrupted
    std::uint32_t resumed = 0, retried = 0;

    bool write() const { return batch->items[first].operation == 1; }

    /// Memory of the next `limit` bytes of what is left, in as few pieces as it takes; `room` has kMaxIovecs.
    std::span<iovec> iovecs(std::span<iovec> room, std::uint32_t limit) const;

    /// Take in the result of a system call, bytes or -errno. True: issue another for what is left. False: every IOCTX is settled.
    bool take(std::int32_t result);

  private:
    bool alone();
};

struct Limits {
    std::uint64_t segment_size;  // bytes
    unsigned depth;              // transfers in flight
};

/// What a queue has done since it was made. The order is part of the ABI (tutti_engine_counters).
struct Counters {
    std::uint64_t contexts = 0, transfers = 0, bytes = 0, resumed = 0, retried = 0;
};

class Queue {
  public:
    explicit Queue(const Limits &limits) : limits_(limits) {}

    /// False when the segment has a file already.
    bool attach(std::uint32_t segment, int fd);
    /// Forget the segment's file; what has not started on it ends with -EBADF. False when some transfer has not ended by `until_ns`.
    bool detach(std::uint32_t segment, std::int64_t until_ns);
    /// Registered files whose segment is gone.
    std::vector<int> take_retired_slots();

    /// Queue items [begin, end) of the batch. Those that are malformed or whose segment has no file end at once.
    void push(std::shared_ptr<Batch> batch, std::uint32_t begin, std::uint32_t end);
    /// End what has not started of `batch` (null: of every batch) with `error`.
    void drop(const Batch *batch, std::int32_t error);

    /// The next transfer to start, if there is one that may.
    std::optional<Work> next();
    /// A transfer that `next` gave out has ended.
    void finish(const Work &work);

    bool idle();
    /// Wait until nothing is queued or in flight. False when the clock reached `until_ns` before.
    bool wait_idle(std::int64_t until_ns);
    Counters counters();

  private:
    /// What has not started of one batch.
    struct Run {
        std::shared_ptr<Batch> batch;
        std::uint32_t next, end;
        std::uint32_t skip = 0;  // bytes of items[next] that have started
    };

    std::deque<Run> *pick();
    bool refused(Run &run, std::uint32_t at);
    Work form(Run &run);
    void end_item(Run &run, std::uint32_t at, std::int32_t error);
    void end_segment(std::uint32_t segment);
    bool in_segment(const Batch::Item &item, std::uint32_t segment) const { return item.offset / limits_.segment_size == segment; }
    void coalesce(Work &work, std::uint32_t end) const;
    void drop(Run &run, std::int32_t error);
    void forget_left();
    bool idle_locked() const;

    const Limits limits_;
    std::mutex mutex_;
    std::condition_variable ended_;  // a transfer, or the last of what was queued
    std::unordered_map<std::uint32_t, std::unique_ptr<File>> files_;
    std::vector<std::unique_ptr<File>> leaving_;  // detached, with transfers in flight
    std::vector<int> retired_slots_;
    std::deque<Run> runs_[kClasses];
    unsigned in_flight_[kClasses] = {};
    std::uint64_t last_start_[kClasses] = {};
    Counters counters_;
};

}  // namespace tutti
