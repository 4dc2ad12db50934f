// The CPU twin of the kernel: threads that step many sub-I/Os each, through the same protocol code.
#pragma once

#include <array>
#include <deque>
#include <thread>
#include <vector>

#include "controller.hpp"
#include "sub_io.cuh"

namespace tutti::gio {

class Twin {
public:
    // `window`: sub-I/Os that a thread has in flight. `controllers` are told of new commands, since CPU threads can.
    Twin(const Context& context, u32 workers, u32 window, std::vector<Controller*> controllers)
        : context_(context), window_(window), controllers_(std::move(controllers)), alive_(workers) {
        for (Controller* controller : controllers_) controller->completions = &work;
        for (u32 i = 0; i < workers; ++i) threads_.emplace_back([this] { run(); });
    }

    // Starts IOCB `ring`; those of a smaller class first.
    void issue(u32 ring, u32 klass) {
        {
            std::lock_guard lock(mutex_);
            issued_[klass].push_back({ring, 0, iocb_of(context_, ring).pieces, now_ns()});
        }
        work.ring();
    }

    // Threads stop where they are; false: one did not within the time.
    bool stop(u64 timeout_ns) {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        work.ring();
        u64 deadline = now_ns() + timeout_ns;
        for (u64 seen = done.count(); alive_.load() && now_ns() < deadline; seen = done.wait(seen, 1000000)) work.ring();
        if (alive_.load()) return false;
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        return true;
    }

    Bell work;  // rung when there is something to do: an IOCB, or a completion
    Bell done;  // rung when sub-I/Os have finished

private:
    struct Issued {
        u32 ring, next, pieces;
        u64 start;
    };
    static constexpr u64 kPollNs = 200000;     // how long a CQE may go unseen when nobody rings
    static constexpr u64 kIdleNs = 100000000;

    void run() {
        std::vector<SubIo> active;
        active.reserve(window_);
        u32 lane = 0, late = 0;
        for (;;) {
            u64 seen = work.count();
            bool stopping = take(active, lane);
            if (stopping) break;
            bool submitted = false, finished = false;
            for (size_t i = 0; i < active.size();) {
                Step was = active[i].state(), is = active[i].step(context_);
                submitted |= was == Step::claiming && is == Step::polling;
                if (is < Step::finished) {
                    ++i;
                    continue;
                }
                finished = true;
                active[i] = active.back();
                active.pop_back();
            }
            u32 before = late;
            late = reap_all();
            finished |= late < before;
            if (submitted)
                for (Controller* controller : controllers_) controller->commands.ring();
            if (finished) done.ring();
            else if (!submitted) work.wait(seen, active.empty() && !late ? kIdleNs : kPollNs);
        }
        alive_.fetch_sub(1);
        done.ring();
    }

    // Fills the window from the issued IOCBs. True: stop.
    bool take(std::vector<SubIo>& active, u32& lane) {
        std::lock_guard lock(mutex_);
        for (auto& queue : issued_) {
            while (!queue.empty() && active.size() < window_) {
                Issued& front = queue.front();
                active.emplace_back().begin(context_, front.ring, front.next++, lane++, front.start);
                if (front.next == front.pieces) queue.pop_front();
            }
        }
        return stopping_;
    }

    // Takes the answers to commands that no sub-I/O waits for. Returns how many are still out.
    u32 reap_all() {
        u32 out = 0;
        for (u32 d = 0; d < context_.drive_count; ++d) {
            const Drive& drive = reinterpret_cast<const Drive*>(context_.drives)[d];
            for (u32 i = 0; i < drive.queue_count; ++i) {
                const QueuePair& queue = reinterpret_cast<const QueuePair*>(drive.queues)[i];
                if (LocalRef<u32>(state_of(queue).late).load(relaxed)) out += reap(context_, queue);
            }
        }
        return out;
    }

    const Context context_;
    const u32 window_;
    const std::vector<Controller*> controllers_;
    std::mutex mutex_;
    std::array<std::deque<Issued>, 3> issued_;  // by class
    bool stopping_ = false;
    std::atomic<u32> alive_;
    std::vector<std::thread> threads_;
};

}  // namespace tutti::gio
