// A drive: its queue, and threads that take transfers from it and make the system calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../faults.hpp"
#include "queue.hpp"

namespace tutti {

class Drive : public std::enable_shared_from_this<Drive> {
  public:
    Drive(std::uint16_t ordinal, const tutti_options &options);
    virtual ~Drive() = default;

    /// Something was queued or retired, or the drive is to stop.
    virtual void wake() = 0;
    /// All threads have ended, and none starts again.
    virtual void ended() {}
    /// Bytes of staging that are registered.
    virtual std::uint64_t registered() const { return 0; }

    /// Let the threads end as soon as nothing is queued or in flight. With `join`, wait for that.
    void stop(bool join);

    Queue queue;

  protected:
    /// Run `body` in a thread that keeps this drive alive and takes no signals of the process. False when there is no thread to be had.
    bool start(std::string name, void (*body)(Drive &));
    bool stopping() const { return stopping_.load(std::memory_order_acquire); }
    Verdict judge(const Work &work) const {
        const std::uint64_t start = work.file->segment * options_.segment_size + work.offset;
        return faults_.judge(ordinal_, start + work.moved, start + work.length, work.write());
    }

    const std::uint16_t ordinal_;
    const tutti_options options_;
    const Faults faults_;

  private:
    std::atomic<bool> stopping_ = false;
    std::vector<std::thread> threads_;
};

/// A drive served by one ring in one thread. Null and `error` where io_uring is refused.
std::shared_ptr<Drive> open_uring_drive(std::uint16_t ordinal, const tutti_options &options, int &error);
/// A drive served by up to `options.workers` threads that block in preadv and pwritev. Null when there is not one thread to be had.
std::shared_ptr<Drive> open_pool_drive(std::uint16_t ordinal, const tutti_options &options);

}  // namespace tutti
