// The way of old kernels and strict containers: threads that block in preadv(2) and pwritev(2).

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>

#include "drive.hpp"

namespace tutti {
namespace {

void sleep_us(std::uint32_t us) {
    timespec left{us / 1'000'000, us % 1'000'000 * 1000L};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

class PoolDrive final : public Drive {
  public:
    PoolDrive(std::uint16_t ordinal, const tutti_options &options) : Drive(ordinal, options) {}

    /// How many threads there are.
    unsigned open() {
        const auto body = [](Drive &drive) { static_cast<PoolDrive &>(drive).run(); };
        unsigned workers = 0;
        while (workers < std::min(options_.workers, options_.queue_depth) && start("tutti-pool-" + std::to_string(ordinal_), body)) ++workers;
        return workers;
    }

    void wake() override {
        // Release: a worker that sees the new number sees what was queued before.
        events_.fetch_add(1, std::memory_order_release);
        events_.notify_all();
    }

  private:
    void run() {
        std::vector<iovec> room(kMaxIovecs);
        for (;;) {
            // Read before looking: an event in between changes the number, and the wait returns at once.
            const std::uint32_t seen = events_.load(std::memory_order_acquire);
            if (auto work = queue.next()) {
                while (work->take(call(*work, room))) {}
                queue.finish(*work);
            } else if (stopping()) {
                return;
            } else {
                events_.wait(seen, std::memory_order_acquire);
            }
        }
    }

    std::int32_t call(const Work &work, std::span<iovec> room) {
        const Verdict verdict = judge(work);
        if (verdict.stalls)
            for (const auto until = now_ns() + Faults::kStallNs; !faults_.gate_open() && now_ns() < until;)
                sleep_us(Faults::kPollUs);
        if (verdict.delay_us) sleep_us(verdict.delay_us);
        if (verdict.answer) return *verdict.answer;
        const auto memory = work.iovecs(room, verdict.limit);
        const auto transfer = work.write() ? pwritev : preadv;
        const auto offset = static_cast<off_t>(work.offset + work.moved);
        const ssize_t moved = transfer(work.file->fd, memory.data(), static_cast<int>(memory.size()), offset);
        return moved < 0 ? -errno : static_cast<std::int32_t>(moved);
    }

    std::atomic<std::uint32_t> events_ = 0;
};

}  // namespace

std::shared_ptr<Drive> open_pool_drive(std::uint16_t ordinal, const tutti_options &options) {
    auto drive = std::make_shared<PoolDrive>(ordinal, options);
    if (drive->open()) return drive;
    return nullptr;
}

}  // namespace tutti
