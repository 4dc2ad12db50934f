// The CPU twin of the kernel: threads that step many sub-I/Os each, through the same protocol code.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "bell.hpp"
#include "sub_io.cuh"

namespace tutti::gio {

struct TwinOptions {
    u64 poll_ns;   // how long a CQE may go unseen when nobody rings `work_`: a drive does not
    u32 workers;
    u32 window;    // sub-I/Os in flight at once, of all threads
};

class Twin {
public:
    // `endpoints` are told of new commands, since CPU threads can, and ring back if they can. `done` is rung when an IOCB is complete.
    Twin(const Context& context, const TwinOptions& options, std::vector<Endpoint*> endpoints, Bell& done)
        : context_(context), options_(options), endpoints_(std::move(endpoints)), done_(done), alive_(options.workers) {
        for (Endpoint* endpoint : endpoints_) endpoint->completions = &work_;
        // A class and those below it leave some of the window to the classes above: a demand read must not wait for a slow drive's writes.
        for (u32 klass = 0; klass < kClasses; ++klass) limits_[klass] = std::max<i32>(1, static_cast<i32>(options.window - klass * ((options.window + 7) / 8)));
        for (u32 i = 0; i < options.workers; ++i) threads_.emplace_back([this] { run(); });
    }

    // Starts IOCB `ring`: those of a smaller class first, those of one class in turn. What has not begun by `deadline_ns` ends with -ETIMEDOUT.
    void issue(u32 ring, u32 klass, u64 deadline_ns) {
        Issued issued{ring, now_ns(), deadline_ns, {}};
        for (u32 piece = 0; piece < iocb_of(context_, ring).pieces; ++piece) issued.pieces.push_back(piece);
        {
            std::lock_guard lock(mutex_);
            issued_[klass].push_back(std::move(issued));
            open_.emplace_back(ring, iocb_of(context_, ring).serial);
        }
        work_.ring();
    }

    // Ends what has not begun of IOCB `ring`.
    void cancel(u32 ring) {
        drop(kCancelled, [&](const Issued& it, u32) { return it.ring == ring; });
    }

    // Ends what has not begun on the `size` bytes of a drive from `offset` on, as if they did not exist.
    void refuse(u64 offset, u64 size) {
        drop(kBadRange, [&](const Issued& it, u32 piece) { return context_of(it.ring, piece).offset - offset < size; });
    }

    // Ends what has no command yet with -ECANCELED; commands that are out stay so. False: a thread did not stop within the time.
    bool stop(u64 timeout_ns) {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        drop(kCancelled, [](const Issued&, u32) { return true; });
        u64 deadline = now_ns() + timeout_ns;
        while (alive_.load()) {
            if (now_ns() > deadline) return false;
            work_.ring();
            sched_yield();
        }
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        return true;
    }

private:
    static constexpr u32 kClasses = 3;
    static constexpr u64 kIdleNs = 1000000000;

    struct Issued {
        u32 ring;
        u64 start, deadline;
        std::deque<u32> pieces;  // that have not begun
    };
    struct Active {
        SubIo io;
        u32 klass;
    };

    const Ioctx& context_of(u32 ring, u32 piece) const {
        const Iocb& iocb = iocb_of(context_, ring);
        return iocb.contexts[iocb.map[piece] & (kIocbContexts - 1)];
    }

    void run() {
        std::vector<Active> active;
        u32 lane = 0, late = 0;
        for (;;) {
            u64 seen = work_.count();
            u64 deadline = ~0ull;
            if (begin(active, lane, deadline)) break;
            // First take what has come, then look: an answer that comes in between rings after `seen` was read, and the wait below ends at once.
            u32 before = late;
            late = reap_all();
            bool submitted = false, finished = step(active, submitted) || late < before;
            if (submitted)
                for (Endpoint* endpoint : endpoints_) endpoint->commands.ring();
            if (finished) announce_completed();
            else if (!submitted) {
                u64 now = now_ns(), bound = active.empty() && !late ? kIdleNs : options_.poll_ns;
                work_.wait(seen, deadline > now ? std::min(bound, deadline - now) : 0);
            }
        }
        for (Active& it : active) it.io.abandon(context_, kCancelled);
        alive_.fetch_sub(1);
    }

    // Fills the window, and ends what is past its deadline; `deadline` becomes the next one. True: stop.
    bool begin(std::vector<Active>& active, u32& lane, u64& deadline) {
        u64 now = now_ns();
        auto expired = [&](const Issued& it) { return it.deadline <= now; };
        std::unique_lock lock(mutex_);
        if (std::ranges::any_of(issued_, [&](const auto& queue) { return std::ranges::any_of(queue, expired); })) {
            lock.unlock();
            drop(kNoSlot, [&](const Issued& it, u32) { return expired(it); });
            lock.lock();
        }
        for (u32 klass = 0; klass < kClasses; ++klass) {
            std::deque<Issued>& queue = issued_[klass];
            while (!queue.empty() && room(klass)) {
                Issued next = std::move(queue.front());
                queue.pop_front();
                active.push_back({{}, klass});
                active.back().io.begin(context_, next.ring, next.pieces.front(), lane++, next.start);
                ++running_[klass];
                next.pieces.pop_front();
                if (!next.pieces.empty()) queue.push_back(std::move(next));
            }
            for (const Issued& it : queue) deadline = std::min(deadline, it.deadline);
        }
        return stopping_;
    }

    bool room(u32 klass) const {
        i32 running = 0;
        for (u32 other = klass; other < kClasses; ++other) running += running_[other];
        return running < limits_[klass] && running_[0] + running_[1] + running_[2] < limits_[0];
    }

    // A step of each; true when some have finished.
    bool step(std::vector<Active>& active, bool& submitted) {
        std::array<i32, kClasses> finished{};
        for (size_t i = 0; i < active.size();) {
            Step was = active[i].io.state(), is = active[i].io.step(context_);
            submitted |= was != Step::polling && is == Step::polling;
            if (is < Step::finished) {
                ++i;
                continue;
            }
            ++finished[active[i].klass];
            active[i] = active.back();
            active.pop_back();
        }
        std::lock_guard lock(mutex_);
        for (u32 klass = 0; klass < kClasses; ++klass) running_[klass] -= finished[klass];
        return finished[0] + finished[1] + finished[2] > 0;
    }

    // Takes all answers that have come. Returns how many commands are out that no sub-I/O waits for.
    u32 reap_all() {
        u32 out = 0;
        for (u32 d = 0; d < context_.drive_count; ++d) {
            const Drive& drive = reinterpret_cast<const Drive*>(context_.drives)[d];
            for (u32 i = 0; i < drive.queue_count; ++i) out += reap(context_, reinterpret_cast<const QueuePair*>(drive.queues)[i]);
        }
        return out;
    }

    void drop(u32 code, const std::function<bool(const Issued&, u32)>& concerned) {
        std::vector<std::pair<u32, u32>> dropped;
        {
            std::lock_guard lock(mutex_);
            for (auto& queue : issued_) {
                for (Issued& it : queue)
                    std::erase_if(it.pieces, [&](u32 piece) { return concerned(it, piece) && (dropped.emplace_back(it.ring, piece), true); });
                std::erase_if(queue, [](const Issued& it) { return it.pieces.empty(); });
            }
        }
        for (auto [ring, piece] : dropped) {
            u32 map = iocb_of(context_, ring).map[piece];
            FinishLate{context_}(ring, map & (kIocbContexts - 1), (map >> kJoinShift) + 1, code);
        }
        if (!dropped.empty()) announce_completed();
    }

    // Rings `done` when an IOCB has become complete, and not for each sub-I/O: its listener is a Python thread.
    void announce_completed() {
        std::lock_guard lock(mutex_);
        // By the serial it was issued with: the host may have seen the completion first, and be writing the IOCB's next use.
        auto complete = [&](const std::pair<u32, u64>& it) {
            Completion& completion = reinterpret_cast<Completion*>(context_.completions)[it.first];
            return SystemRef<u64>(completion.serial).load(acquire) >= it.second;
        };
        if (std::erase_if(open_, complete)) done_.ring();
    }

    const Context context_;
    const TwinOptions options_;
    const std::vector<Endpoint*> endpoints_;
    Bell& done_;
    Bell work_;
    std::mutex mutex_;  // guards the rest
    std::array<std::deque<Issued>, kClasses> issued_;  // by class
    std::array<i32, kClasses> limits_{}, running_{};
    std::vector<std::pair<u32, u64>> open_;  // issued, not complete: IOCB, serial
    bool stopping_ = false;
    std::atomic<u32> alive_;
    std::vector<std::thread> threads_;
};

}  // namespace tutti::gio
