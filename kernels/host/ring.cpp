#include "ring.hpp"

#include <cerrno>
#include <cstring>
#include <numeric>
#include <vector>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tutti {
namespace {

template <typename T>
T *at(void *base, std::uint32_t offset) {
    return reinterpret_cast<T *>(static_cast<char *>(base) + offset);
}

int call_setup(unsigned entries, abi::Params &params) {
    const long fd = syscall(abi::kSetup, entries, &params);
    return fd < 0 ? -errno : static_cast<int>(fd);
}

}  // namespace

std::unique_ptr<Ring> Ring::open(unsigned entries, int &error) {
    std::unique_ptr<Ring> ring(new Ring);
    error = ring->set_up(entries);
    return error ? nullptr : std::move(ring);
}

Ring::~Ring() {
    if (sqes_) munmap(sqes_, sqes_size_);
    if (ring_) munmap(ring_, ring_size_);
    if (fd_ >= 0) close(fd_);
}

int Ring::set_up(unsigned entries) {
    // The thread that enters the ring runs its completions itself, all at once, when it waits (6.1); older kernels interrupt it for each.
    abi::Params params{};
    params.flags = abi::kClamp | abi::kSubmitAll | abi::kSingleIssuer | abi::kDeferTaskrun;
    fd_ = call_setup(entries, params);
    if (fd_ == -EINVAL) {
        params = {};
        params.flags = abi::kClamp;
        fd_ = call_setup(entries, params);
    }
    if (fd_ < 0) return -fd_;
    if (const int error = check_operations()) return error;
    // One mapping for both rings (5.4), no dropped completions (5.5): everything newer than what READ needs (5.6).
    constexpr std::uint32_t needed = abi::kSingleMmap | abi::kNoDrop;
    if ((params.features & needed) != needed) return EOPNOTSUPP;
    return map(params);
}

int Ring::map(const abi::Params &params) {
    ring_size_ = std::max<std::size_t>(params.sq.array + params.sq_entries * sizeof(std::uint32_t),
                                       params.cq.cqes + params.cq_entries * sizeof(abi::Cqe));
    void *ring = mmap(nullptr, ring_size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, abi::kOffsetRing);
    if (ring == MAP_FAILED) return errno;
    ring_ = ring;
    sqes_size_ = params.sq_entries * sizeof(abi::Sqe);
    void *sqes = mmap(nullptr, sqes_size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, abi::kOffsetSqes);
    if (sqes == MAP_FAILED) return errno;
    sqes_ = static_cast<abi::Sqe *>(sqes);
    // A forked child must not touch the rings: it would submit in the parent's name.
    madvise(ring_, ring_size_, MADV_DONTFORK);
    madvise(sqes_, sqes_size_, MADV_DONTFORK);

    sq_head_ = at<std::uint32_t>(ring_, params.sq.head);
    sq_tail_ = at<std::uint32_t>(ring_, params.sq.tail);
    sq_mask_ = *at<std::uint32_t>(ring_, params.sq.ring_mask);
    sq_entries_ = params.sq_entries;
    cq_head_ = at<std::uint32_t>(ring_, params.cq.head);
    cq_tail_ = at<std::uint32_t>(ring_, params.cq.tail);
    cq_mask_ = *at<std::uint32_t>(ring_, params.cq.ring_mask);
    cqes_ = at<abi::Cqe>(ring_, params.cq.cqes);
    // Entry i of the queue is always sqes[i]: the indirection is filled once.
    auto *array = at<std::uint32_t>(ring_, params.sq.array);
    std::iota(array, array + sq_entries_, 0);
    prepared_ = *sq_tail_;
    return 0;
}

int Ring::check_operations() const {
    abi::Probe probe{};
    if (do_register(abi::kProbe, &probe, std::size(probe.ops)) < 0) return EOPNOTSUPP;
    for (const auto opcode : {abi::kReadv, abi::kWritev, abi::kReadFixed, abi::kWriteFixed, abi::kTimeout, abi::kRead, abi::kWrite})
        if (opcode > probe.last_opcode || !(probe.ops[opcode].flags & abi::kSupported)) return EOPNOTSUPP;
    return 0;
}

abi::Sqe *Ring::sqe() {
    // Acquire: the kernel has read an entry before it releases the head that frees it for us to overwrite.
    const std::uint32_t head = std::atomic_ref(*sq_head_).load(std::memory_order_acquire);
    if (prepared_ - head == sq_entries_) return nullptr;
    abi::Sqe *entry = &sqes_[prepared_++ & sq_mask_];
    std::memset(entry, 0, sizeof *entry);
    return entry;
}

int Ring::enter(unsigned wanted) {
    // Release: the entries are filled before the tail that announces them.
    std::atomic_ref(*sq_tail_).store(prepared_, std::memory_order_release);
    const std::uint32_t pending = prepared_ - std::atomic_ref(*sq_head_).load(std::memory_order_acquire);
    const long done = syscall(abi::kEnter, fd_, pending, wanted, abi::kGetEvents, nullptr, 0);
    return done < 0 ? -errno : 0;
}

long Ring::do_register(unsigned opcode, const void *argument, unsigned count) const {
    return syscall(abi::kRegister, fd_, opcode, argument, count);
}

bool Ring::reserve_files(unsigned count) {
    const std::vector<std::int32_t> none(count, -1);
    return do_register(abi::kRegisterFiles, none.data(), count) >= 0;
}

bool Ring::reserve_buffers(unsigned count) {
    abi::RsrcRegister empty{};
    empty.count = count;
    empty.flags = abi::kSparse;
    return do_register(abi::kRegisterBuffers, &empty, sizeof empty) >= 0;
}

bool Ring::set_file(unsigned slot, int fd) {
    const std::int32_t value = fd;
    abi::FilesUpdate update{slot, 0, reinterpret_cast<std::uint64_t>(&value)};
    return do_register(abi::kUpdateFiles, &update, 1) == 1;
}

bool Ring::set_buffer(unsigned slot, iovec buffer) {
    abi::RsrcUpdate update{slot, 0, reinterpret_cast<std::uint64_t>(&buffer), 0, 1, 0};
    return do_register(abi::kUpdateBuffers, &update, sizeof update) == 1;
}

}  // namespace tutti
