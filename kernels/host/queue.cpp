#include "queue.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace tutti {
namespace {

/// Every so many starts one goes to the class that has waited longest, so that nobody starves.
constexpr std::uint64_t kFairness = 16;
constexpr std::uint32_t kAttempts = 16;

std::chrono::steady_clock::time_point steady(std::int64_t ns) {  // std::chrono::steady_clock is CLOCK_MONOTONIC
    return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(ns));
}

}  // namespace

std::span<iovec> Work::iovecs(std::span<iovec> room, std::uint32_t limit) const {
    std::size_t used = 0;
    std::uint32_t before = skip + moved;
    std::uint32_t left = std::min(limit, length - moved);
    for (std::uint32_t at = first; left; ++at) {
        const auto &item = batch->items[at];
        if (before >= item.length) {
            before -= item.length;
            continue;
        }
        auto *memory = reinterpret_cast<char *>(static_cast<std::uintptr_t>(item.address)) + before;
        const std::uint32_t bytes = std::min(left, item.length - before);
        if (used && static_cast<char *>(room[used - 1].iov_base) + room[used - 1].iov_len == memory)
            room[used - 1].iov_len += bytes;
        else
            room[used++] = {memory, bytes};
        left -= bytes;
        before = 0;
    }
    return room.first(used);
}

bool Work::take(std::int32_t result) {
    if ((result == -EINTR || result == -EAGAIN) && ++attempts < kAttempts) return true;
    if (result > 0) {
        moved += static_cast<std::uint32_t>(result);
        if (moved < length) return ++resumed, true;
        for (; count; --count) batch->settle(first++, 1, 0);
    } else {
        const std::int32_t error = result < 0 ? result : -EIO;  // nothing moved: the file ends here, and asking again would loop
        // What came whole before the failure is good. Which of the others it was is not known, so each is tried alone.
        for (; count > 1 && moved >= batch->items[first].length; --count) {
            const std::uint32_t whole = batch->items[first].length;
            moved -= whole;
            offset += whole;
            batch->settle(first++, 1, 0);
        }
        const bool late = now_ns() >= batch->deadline_ns;
        if (count > 1 && !late) return alone();
        for (const std::uint32_t last = late ? end : first + 1; first < last;) batch->settle(first++, 1, error);
    }
    offset += length;
    return first < end && alone();
}

/// Transfer items[first] by itself.
bool Work::alone() {
    count = 1;
    length = batch->items[first].length;
    moved = attempts = 0;
    return ++retried, true;
}

bool Queue::attach(std::uint32_t segment, int fd) {
    std::lock_guard lock(mutex_);
    return files_.try_emplace(segment, std::make_unique<File>(File{segment, fd})).second;
}

bool Queue::detach(std::uint32_t segment, std::int64_t until_ns) {
    std::unique_lock lock(mutex_);
    if (auto file = files_.extract(segment)) {
        leaving_.push_back(std::move(file.mapped()));
        end_segment(segment);
    }
    const auto gone = [&] { return std::ranges::none_of(leaving_, [&](const auto &file) { return file->segment == segment; }); };
    forget_left();
    return ended_.wait_until(lock, steady(until_ns), gone);
}

void Queue::forget_left() {
    std::erase_if(leaving_, [this](const auto &file) {
        if (file->in_flight) return false;
        if (file->slot >= 0) retired_slots_.push_back(file->slot);
        return true;
    });
}

std::vector<int> Queue::take_retired_slots() {
    std::lock_guard lock(mutex_);
    return std::exchange(retired_slots_, {});
}

void Queue::push(std::shared_ptr<Batch> batch, std::uint32_t begin, std::uint32_t end) {
    std::lock_guard lock(mutex_);
    Run run{std::move(batch), begin, end};
    // Here and not when its turn comes: behind a drive that does not answer no turn comes.
    bool any = false;
    for (std::uint32_t at = begin; at < end; ++at) any |= !refused(run, at);
    if (any) runs_[std::min(run.batch->klass, kClasses - 1)].push_back(std::move(run));
}

void Queue::drop(const Batch *batch, std::int32_t error) {
    std::lock_guard lock(mutex_);
    for (auto &runs : runs_)
        std::erase_if(runs, [&](Run &run) {
            if (batch && run.batch.get() != batch) return false;
            drop(run, error);
            return true;
        });
    if (idle_locked()) ended_.notify_all();
}

void Queue::drop(Run &run, std::int32_t error) {
    for (std::uint32_t at = run.next; at < run.end; ++at) end_item(run, at, error);
}

/// Settle what has not started of an item; pieces of it may be in flight.
void Queue::end_item(Run &run, std::uint32_t at, std::int32_t error) {
    auto &item = run.batch->items[at];
    if (std::exchange(item.ended, true)) return;
    const std::uint32_t all = item.length ? (item.length - 1) / run.batch->max_io + 1 : 1;
    const std::uint32_t started = at == run.next ? run.skip / run.batch->max_io : 0;
    run.batch->settle(at, all - started, error);
}

void Queue::end_segment(std::uint32_t segment) {
    for (auto &runs : runs_)
        for (auto &run : runs)
            for (std::uint32_t at = run.next; at < run.end; ++at)
                if (in_segment(run.batch->items[at], segment)) end_item(run, at, -EBADF);
}

std::deque<Queue::Run> *Queue::pick() {
    // A quarter of the depth is kept for demand: a request that waits need not queue behind 32 transfers that nobody waits for.
    const bool room = in_flight_[1] + in_flight_[2] < std::max(1u, limits_.depth - limits_.depth / 4);
    const bool fair = counters_.transfers % kFairness == kFairness - 1;
    unsigned chosen = kClasses;
    for (unsigned klass = 0; klass < kClasses; ++klass) {
        if (runs_[klass].empty() || (klass > 0 && !room)) continue;
        if (chosen == kClasses || (fair && last_start_[klass] < last_start_[chosen])) chosen = klass;
    }
    return chosen == kClasses ? nullptr : &runs_[chosen];
}

std::optional<Work> Queue::next() {
    std::lock_guard lock(mutex_);
    while (auto *runs = pick()) {
        Run run = std::move(runs->front());
        runs->pop_front();
        if (now_ns() >= run.batch->deadline_ns) {
            drop(run, -ETIMEDOUT);
            continue;
        }
        for (; run.next < run.end && run.batch->items[run.next].ended; ++run.next) run.skip = 0;
        if (run.next == run.end) continue;
        Work work = form(run);
        ++work.file->in_flight;
        ++in_flight_[runs - runs_];
        last_start_[runs - runs_] = ++counters_.transfers;
        counters_.contexts += work.count;
        counters_.bytes += work.length;
        // To the back: batches of one class take turns, so that a small one does not wait for a large one.
        if (run.next < run.end) runs->push_back(std::move(run));
        return work;
    }
    if (idle_locked()) ended_.notify_all();
    return std::nullopt;
}

/// Whether items[at] cannot have any I/O; it is settled then.
bool Queue::refused(Run &run, std::uint32_t at) {
    const auto &item = run.batch->items[at];
    const std::uint64_t place = item.offset % limits_.segment_size;
    std::int32_t error = 0;
    if (item.operation > 1 || item.length == 0 || item.length > INT32_MAX || place + item.length > limits_.segment_size)
        error = -EINVAL;
    else if (const std::uint64_t segment = item.offset / limits_.segment_size;
             segment > UINT32_MAX || !files_.contains(static_cast<std::uint32_t>(segment)))
        error = -EBADF;
    if (error) end_item(run, at, error);
    return error;
}

Work Queue::form(Run &run) {
    const auto &item = run.batch->items[run.next];
    File *file = files_.at(static_cast<std::uint32_t>(item.offset / limits_.segment_size)).get();
    const std::uint32_t length = std::min(item.length - run.skip, run.batch->max_io);
    Work work{run.batch, file, item.offset % limits_.segment_size + run.skip, run.next, 1, run.next + 1, run.skip, length};
    if (item.length <= run.batch->max_io)
        coalesce(work, run.end);
    else if (run.skip += length; run.skip < item.length)
        return work;
    for (std::uint32_t at = run.next; at < work.end; ++at) run.batch->items[at].ended = true;
    run.next = work.end;
    run.skip = 0;
    return work;
}

/// Add the items that follow on the drive, as long as they are in the same file and no limit is reached.
void Queue::coalesce(Work &work, std::uint32_t end) const {
    const auto &items = work.batch->items;
    const std::uint64_t room = limits_.segment_size - work.offset;
    for (unsigned iovecs = 1; work.end < end; ++work.end, ++work.count) {
        const auto &last = items[work.end - 1], &item = items[work.end];
        if (item.offset != last.offset + last.length || item.operation != last.operation) return;
        if (item.ended || item.length == 0) return;
        const std::uint64_t length = static_cast<std::uint64_t>(work.length) + item.length;
        if (length > std::min<std::uint64_t>(work.batch->max_io, room)) return;
        if (item.address != last.address + last.length && ++iovecs > kMaxIovecs) return;
        work.length = static_cast<std::uint32_t>(length);
    }
}

void Queue::finish(const Work &work) {
    std::lock_guard lock(mutex_);
    const unsigned klass = std::min(work.batch->klass, kClasses - 1);
    --in_flight_[klass];
    --work.file->in_flight;
    counters_.resumed += work.resumed;
    counters_.retried += work.retried;
    if (work.file->in_flight && !idle_locked()) return;
    forget_left();
    ended_.notify_all();
}

bool Queue::idle_locked() const {
    return std::ranges::all_of(runs_, [](const auto &runs) { return runs.empty(); }) &&
           std::ranges::all_of(in_flight_, [](unsigned count) { return count == 0; });
}

bool Queue::idle() {
    std::lock_guard lock(mutex_);
    return idle_locked();
}

bool Queue::wait_idle(std::int64_t until_ns) {
    std::unique_lock lock(mutex_);
    return ended_.wait_until(lock, steady(until_ns), [&] { return idle_locked(); });
}

Counters Queue::counters() {
    std::lock_guard lock(mutex_);
    return counters_;
}

}  // namespace tutti
