#include "batch.hpp"

#include <cerrno>
#include <ctime>
#include <utility>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tutti {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "a futex is a plain 32-bit word");

void wake_all(std::atomic<std::uint32_t> &word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

/// FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC: a spurious wake-up does not prolong the wait.
void sleep_while_zero(std::atomic<std::uint32_t> &word, std::int64_t until_ns) {
    const timespec until{until_ns / kSecond, until_ns % kSecond};
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 0, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * kSecond + now.tv_nsec;
}

Batch::Batch(std::span<const tutti_ioctx> contexts, unsigned klass, std::int64_t deadline_ns, std::uint32_t max_io)
    : klass(klass), deadline_ns(deadline_ns), max_io(max_io), items(contexts.size()), results_(contexts.size(), -EINPROGRESS),
      pending_(static_cast<std::uint32_t>(contexts.size())) {
    // A counting sort by drive: it keeps the caller's order within a drive, and costs little where all go to one.
    std::vector<std::uint32_t> count;
    for (const auto &context : contexts) {
        if (context.drive >= count.size()) count.resize(context.drive + 1u);
        ++count[context.drive];
    }
    std::uint32_t begin = 0;
    for (std::size_t drive = 0; drive < count.size(); ++drive) {
        if (count[drive]) parts.push_back({static_cast<std::uint16_t>(drive), begin, begin + count[drive]});
        begin += std::exchange(count[drive], begin);
    }
    for (std::uint32_t index = 0; index < contexts.size(); ++index) {
        const auto &c = contexts[index];
        const std::uint32_t pieces = c.length ? (c.length - 1) / max_io + 1 : 1;
        items[count[c.drive]++] = {c.address, c.offset, c.length, index, pieces, 0, c.tag, c.operation, false};
    }
    if (contexts.empty()) done_ = 1;
}

void Batch::settle(std::uint32_t at, std::uint32_t count, std::int32_t error) {
    Item &item = items[at];
    // EIO says least (it is also our word for a file that ends early): among the errors of several pieces it yields.
    if (std::int32_t none = 0; error == -EIO)
        std::atomic_ref(item.error).compare_exchange_strong(none, error, std::memory_order_relaxed);
    else if (error)
        std::atomic_ref(item.error).store(error, std::memory_order_relaxed);
    // Acquire and release: who ends the last piece sees the errors of all others, and passes their bytes on with the result.
    if (std::atomic_ref(item.pieces).fetch_sub(count, std::memory_order_acq_rel) != count) return;
    const std::int32_t failed = std::atomic_ref(item.error).load(std::memory_order_relaxed);
    const std::int32_t result = failed ? failed : static_cast<std::int32_t>(item.length);
    // Release: whoever reads this result sees the bytes that it speaks of.
    std::atomic_ref(results_[item.index]).store(result, std::memory_order_release);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    done_.store(1, std::memory_order_release);
    wake_all(done_);
}

bool Batch::wait(std::int64_t until_ns) {
    while (!done() && now_ns() < until_ns) sleep_while_zero(done_, until_ns);
    return done();
}

bool Batch::results(std::int32_t *out) const {
    bool final = true;
    for (std::size_t i = 0; i < results_.size(); ++i) {
        out[i] = std::atomic_ref(results_[i]).load(std::memory_order_acquire);
        final = final && out[i] != -EINPROGRESS;
    }
    return final;
}

bool Batch::account(tutti_moved &moved) const {
    bool final = true;
    for (const auto &part : parts)
        for (std::uint32_t at = part.begin; at < part.end; ++at) {
            const Item &item = items[at];
            ++moved.counts[part.drive];
            moved.bytes[part.drive] += item.length;
            const std::int32_t result = std::atomic_ref(results_[item.index]).load(std::memory_order_acquire);
            if (result == static_cast<std::int32_t>(item.length)) continue;
            final = final && result != -EINPROGRESS;
            moved.failed[moved.failed_count++] = {item.address, item.offset, item.length, result, part.drive, item.operation,
                                                  static_cast<std::uint8_t>(klass), item.tag};
        }
    return final;
}

}  // namespace tutti
