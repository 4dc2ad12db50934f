// Lets idle threads of the host sleep: nothing of the protocol depends on it, since a GPU can't ring it and every wait is bounded.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "platform.cuh"

namespace tutti::gio {

class Bell {
public:
    // seq_cst on both sides: either the ringer sees the waiter, or the waiter the new count.
    void ring() {
        count_.fetch_add(1);
        if (waiting_.load()) {
            std::lock_guard lock(mutex_);
            changed_.notify_all();
        }
    }

    u64 count() const { return count_.load(); }

    // Until the count differs from `seen`, at most `timeout_ns`. Returns the count.
    u64 wait(u64 seen, u64 timeout_ns) {
        std::unique_lock lock(mutex_);
        waiting_.fetch_add(1);
        changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return count_.load() != seen; });
        waiting_.fetch_sub(1);
        return count_.load();
    }

private:
    std::atomic<u64> count_{0};
    std::atomic<u32> waiting_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

// What is behind queue pairs, as far as it can be woken by threads of the host, and wake them.
struct Endpoint {
    Bell commands;  // rung by a host that knows of new commands
    std::atomic<Bell*> completions{nullptr};  // rung after each completion, by those that can; must outlive their threads
};

}  // namespace tutti::gio
