// One io_uring: set up by raw system calls, used by the one thread that set it up.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "uring_abi.hpp"

namespace tutti {

class Ring {
  public:
    /// A ring with room for `entries` submissions. Null and `error` (an errno) where the system refuses it: ENOSYS (old kernel), EPERM
    /// (seccomp, kernel.io_uring_disabled), ENOMEM (locked memory), EOPNOTSUPP (an operation is missing).
    static std::unique_ptr<Ring> open(unsigned entries, int &error);
    ~Ring();
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;

    /// The next free submission entry, zeroed; null when all are taken: call `enter` first.
    abi::Sqe *sqe();

    /// Submit what was prepared and wait for `wanted` completions. 0 or -errno; -EINTR, -EAGAIN and -EBUSY mean: reap and come again.
    int enter(unsigned wanted);

    /// Call `reap(user_data, result)` for each completion that is there.
    template <typename Reap>
    void drain(Reap &&reap) {
        std::uint32_t head = *cq_head_;  // written by this thread alone
        // Acquire: the kernel fills an entry, then releases the tail that covers it; what we read after this load is that entry.
        const std::uint32_t tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
        for (; head != tail; ++head) {
            const abi::Cqe cqe = cqes_[head & cq_mask_];
            // Release: our read of the entry must not sink below the head that gives it back to the kernel for reuse.
            std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
            reap(cqe.user_data, cqe.result);
        }
    }

    /// Make room for `count` registered files, or buffers. False where the system refuses: then none may be used.
    bool reserve_files(unsigned count);
    bool reserve_buffers(unsigned count);
    /// Put `fd` (-1: nothing) or `buffer` (empty: nothing) at `slot`. False when refused; the slot is empty then.
    bool set_file(unsigned slot, int fd);
    bool set_buffer(unsigned slot, iovec buffer);

  private:
    Ring() = default;
    int set_up(unsigned entries);
    int map(const abi::Params &params);
    int check_operations() const;
    long do_register(unsigned opcode, const void *argument, unsigned count) const;

    int fd_ = -1;
    void *ring_ = nullptr;
    std::size_t ring_size_ = 0;
    abi::Sqe *sqes_ = nullptr;
    std::size_t sqes_size_ = 0;
    std::uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    std::uint32_t sq_mask_ = 0, sq_entries_ = 0, cq_mask_ = 0;
    std::uint32_t prepared_ = 0;  // the tail, ours: entries up to here are filled
    const abi::Cqe *cqes_ = nullptr;
};

}  // namespace tutti
