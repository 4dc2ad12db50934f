// The fast way: one ring and one thread for each drive. The thread sleeps only in io_uring_enter(2), where completions and the eventfd
// of `wake` reach it alike.

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <future>
#include <mutex>
#include <utility>

#include "drive.hpp"
#include "ring.hpp"

namespace tutti {
namespace {

constexpr unsigned kFiles = 1024;              // registered at once; more are used by their descriptor
constexpr std::uint64_t kBuffer = 32ull << 20;  // staging is registered piece by piece: all at once would take too long

/// A place for one transfer in flight.
struct Slot {
    std::optional<Work> work;
    Verdict verdict;
    std::int64_t stalls_until;
    abi::Timespec pause;
    iovec room[kMaxIovecs];
};

class UringDrive final : public Drive {
  public:
    UringDrive(std::uint16_t ordinal, const tutti_options &options) : Drive(ordinal, options), slots_(options.queue_depth) {
        for (auto &slot : slots_) free_.push_back(&slot);
    }
    ~UringDrive() override { ended(); }

    /// 0 or an errno. The ring belongs to the thread that makes it (SINGLE_ISSUER), so the thread comes first.
    int open() {
        event_ = eventfd(0, EFD_CLOEXEC);
        if (event_ < 0) return errno;
        auto opened = opened_.get_future();
        const auto body = [](Drive &drive) { static_cast<UringDrive &>(drive).run(); };
        return start("tutti-uring-" + std::to_string(ordinal_), body) ? opened.get() : EAGAIN;
    }

    void wake() override {
        const std::uint64_t one = 1;
        std::lock_guard lock(event_mutex_);
        while (event_ >= 0 && write(event_, &one, sizeof one) < 0 && errno == EINTR) {}
    }

    /// The ring is gone with its thread; the descriptor need not wait until Python lets go of the engine.
    void ended() override {
        std::lock_guard lock(event_mutex_);
        if (event_ >= 0) close(std::exchange(event_, -1));
    }

    std::uint64_t registered() const override { return registered_.load(std::memory_order_relaxed); }

  private:
    static constexpr std::uint64_t kEvent = ~0ull;

    void run() {
        int error = 0;
        ring_ = Ring::open(static_cast<unsigned>(slots_.size()) + 1, error);
        if (ring_) prepare();
        opened_.set_value(error);
        if (!ring_) return;
        listen();
        if (!buffers_.empty()) register_buffer(0);  // the first I/O lies there, and would wait for it; the others when they are used
        for (;;) {
            for (const int slot : queue.take_retired_slots()) forget(slot);
            fill();
            if (stopping() && queue.idle()) break;
            enter();
            ring_->drain([this](std::uint64_t id, std::int32_t result) { completed(id, result); });
        }
        ring_.reset();
    }

    /// Start transfers until the depth is reached or nothing may start.
    void fill() {
        while (!free_.empty()) {
            auto work = queue.next();
            if (!work) return;
            Slot &slot = *free_.back();
            free_.pop_back();
            slot.work = std::move(work);
            call(slot);
        }
    }

    void enter() {
        const int error = ring_->enter(1);
        if (error == 0 || error == -EINTR) return;
        // -EAGAIN, -EBUSY: the kernel is short of memory for now. Anything else is beyond us, but transfers may be in flight: keep asking.
        const timespec nap{0, 1'000'000};
        nanosleep(&nap, nullptr);
    }

    void completed(std::uint64_t id, std::int32_t result) {
        if (id == kEvent) return listen();
        Slot &slot = slots_[id >> 1];
        if (id & 1)
            proceed(slot);
        else
            answered(slot, result);
    }

    /// Make the next system call of the slot's transfer.
    void call(Slot &slot) {
        slot.verdict = judge(*slot.work);
        if (slot.verdict.stalls) slot.stalls_until = now_ns() + Faults::kStallNs;
        proceed(slot);
    }

    void proceed(Slot &slot) {
        Verdict &verdict = slot.verdict;
        verdict.stalls = verdict.stalls && !faults_.gate_open() && now_ns() < slot.stalls_until;
        if (verdict.stalls) return pause(slot, Faults::kPollUs);
        if (verdict.delay_us) return pause(slot, std::exchange(verdict.delay_us, 0));
        if (verdict.answer) return answered(slot, *verdict.answer);
        submit(slot);
    }

    void answered(Slot &slot, std::int32_t result) {
        if (slot.work->take(result)) return call(slot);
        queue.finish(*slot.work);
        slot.work.reset();
        free_.push_back(&slot);
    }

    void submit(Slot &slot) {
        const Work &work = *slot.work;
        const auto memory = work.iovecs(slot.room, slot.verdict.limit);
        abi::Sqe &entry = *ring_->sqe();  // there is one for each slot, and one for the eventfd
        entry.offset = work.offset + work.moved;
        entry.user_data = static_cast<std::uint64_t>(&slot - slots_.data()) << 1;
        if (const int file = registered_file(*work.file); file >= 0) {
            entry.fd = file;
            entry.flags = abi::kFixedFile;
        } else {
            entry.fd = work.file->fd;
        }
        if (memory.size() > 1) {
            entry.opcode = work.write() ? abi::kWritev : abi::kReadv;
            entry.address = reinterpret_cast<std::uint64_t>(memory.data());
            entry.length = static_cast<std::uint32_t>(memory.size());
            return;
        }
        entry.address = reinterpret_cast<std::uint64_t>(memory[0].iov_base);
        entry.length = static_cast<std::uint32_t>(memory[0].iov_len);
        if (const int buffer = registered_buffer(entry.address, entry.length); buffer >= 0) {
            entry.opcode = work.write() ? abi::kWriteFixed : abi::kReadFixed;
            entry.buffer = static_cast<std::uint16_t>(buffer);
        } else {
            entry.opcode = work.write() ? abi::kWrite : abi::kRead;
        }
    }

    void pause(Slot &slot, std::uint32_t us) {
        slot.pause = {us / 1'000'000, us % 1'000'000 * 1000};
        abi::Sqe &entry = *ring_->sqe();
        entry.opcode = abi::kTimeout;
        entry.address = reinterpret_cast<std::uint64_t>(&slot.pause);
        entry.length = 1;
        entry.user_data = static_cast<std::uint64_t>(&slot - slots_.data()) << 1 | 1;
    }

    /// One read of the eventfd is always on its way.
    void listen() {
        abi::Sqe &entry = *ring_->sqe();
        entry.opcode = abi::kRead;
        entry.fd = event_;
        entry.address = reinterpret_cast<std::uint64_t>(&event_count_);
        entry.length = sizeof event_count_;
        entry.user_data = kEvent;
    }

    void prepare() {
        if (ring_->reserve_files(kFiles))
            for (int slot = kFiles; slot-- > 0;) free_files_.push_back(slot);
        const auto buffers = static_cast<unsigned>((options_.staging_size + kBuffer - 1) / kBuffer);
        if (buffers && ring_->reserve_buffers(buffers)) buffers_.resize(buffers);
    }

    /// The slot of a registered file: no reference is taken and dropped for each transfer. -1: none is free.
    int registered_file(File &file) {
        if (file.slot < 0 && !free_files_.empty()) {
            if (ring_->set_file(static_cast<unsigned>(free_files_.back()), file.fd)) {
                file.slot = free_files_.back();
                free_files_.pop_back();
            } else {
                free_files_.clear();
            }
        }
        return file.slot;
    }

    void forget(int slot) {
        ring_->set_file(static_cast<unsigned>(slot), -1);
        free_files_.push_back(slot);
    }

    /// The registered buffer that holds all of this memory: its pages are not looked up and pinned for each transfer. -1: none.
    int registered_buffer(std::uint64_t address, std::uint32_t length) {
        const std::uint64_t place = address - options_.staging_address;  // huge when it lies before
        if (place >= options_.staging_size || length > options_.staging_size - place) return -1;
        const std::uint64_t index = place / kBuffer;
        if (index >= buffers_.size() || index != (place + length - 1) / kBuffer) return -1;
        if (!buffers_[index]) register_buffer(index);
        return index < buffers_.size() ? static_cast<int>(index) : -1;
    }

    void register_buffer(std::uint64_t index) {
        const std::uint64_t start = index * kBuffer, size = std::min(kBuffer, options_.staging_size - start);
        if (ring_->set_buffer(static_cast<unsigned>(index), {reinterpret_cast<void *>(options_.staging_address + start), size})) {
            buffers_[index] = true;
            registered_.fetch_add(size, std::memory_order_relaxed);
        } else {
            buffers_.clear();  // ENOMEM: RLIMIT_MEMLOCK is reached. What is registered already stays pinned, and unused
        }
    }

    std::unique_ptr<Ring> ring_;
    std::vector<Slot> slots_;
    std::vector<Slot *> free_;
    std::vector<int> free_files_;
    std::vector<bool> buffers_;  // whether registered; empty: none may be
    std::atomic<std::uint64_t> registered_ = 0;
    std::promise<int> opened_;
    std::mutex event_mutex_;
    int event_ = -1;
    std::uint64_t event_count_ = 0;
};

}  // namespace

std::shared_ptr<Drive> open_uring_drive(std::uint16_t ordinal, const tutti_options &options, int &error) {
    auto drive = std::make_shared<UringDrive>(ordinal, options);
    error = drive->open();
    if (!error) return drive;
    drive->stop(true);
    return nullptr;
}

}  // namespace tutti
