// Rings a drive's doorbells for a mover that cannot reach them: a thread copies words of shared memory to registers.
//
// Skipping values is harmless: an index never comes round to the same value between two looks, since a controller that was told nothing
// completes nothing, and one that was not told of taken entries posts no more than a queue holds.
#pragma once

#include <thread>
#include <vector>

#include "bell.hpp"

namespace tutti::gio {

struct RelayLine {
    u64 word;      // where the mover writes
    u64 doorbell;  // the register
};

class Relay : public Endpoint {
public:
    // The words are 0 and so are the queues' indices. After `spin_ns` without news it sleeps for `idle_ns` at a time, unless it is woken.
    Relay(std::vector<RelayLine> lines, u64 spin_ns, u64 idle_ns)
        : lines_(std::move(lines)), last_(lines_.size()), spin_ns_(spin_ns), idle_ns_(idle_ns), thread_([this] { run(); }) {}

    ~Relay() {
        stopping_.store(true);
        commands.ring();
        thread_.join();
    }

    u64 rings() const { return rings_.load(); }

private:
    void run() {
        u64 active = now_ns();
        while (!stopping_.load()) {
            u64 seen = commands.count();
            if (copy()) active = now_ns();
            else if (now_ns() - active > spin_ns_) commands.wait(seen, idle_ns_);
            else sched_yield();
        }
    }

    bool copy() {
        u64 rung = 0;
        for (size_t i = 0; i < lines_.size(); ++i) {
            // Acquire: the commands that the mover wrote before this index. Pairs with the release in ring_doorbell, on either target.
            u32 index = SystemRef<u32>(*reinterpret_cast<u32*>(lines_[i].word)).load(acquire);
            if (index == last_[i]) continue;
            last_[i] = index;
            ring_doorbell(lines_[i].doorbell, index);
            ++rung;
        }
        rings_.fetch_add(rung);
        return rung > 0;
    }

    const std::vector<RelayLine> lines_;
    std::vector<u32> last_;
    const u64 spin_ns_, idle_ns_;
    std::atomic<u64> rings_{0};
    std::atomic<bool> stopping_{false};
    std::thread thread_;  // last: it uses the rest
};

}  // namespace tutti::gio
