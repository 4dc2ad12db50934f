// What the controller does with a command: the checks of the specification, then the bytes.
#include <errno.h>
#include <unistd.h>

#include "bus_memory.hpp"
#include "controller.hpp"

namespace tutti::gio {

namespace {

u32 status_of(int error, bool write) {
    switch (error) {
        case ENOSPC: case EDQUOT: return kCapacityExceeded;
        case EFAULT: return kDataTransferError;
        case EIO: return write ? kWriteFault : kUnrecoveredRead;
        default: return kInternalError;
    }
}

// Moves all bytes, resuming short transfers. A file that ends early has no such block.
u32 move_all(int fd, std::vector<iovec>& pieces, off_t offset, bool write, int flags) {
    for (size_t next = 0; next < pieces.size();) {
        int count = static_cast<int>(pieces.size() - next);
        ssize_t moved = write ? pwritev2(fd, &pieces[next], count, offset, flags) : preadv2(fd, &pieces[next], count, offset, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return status_of(errno, write);
        if (moved == 0) return write ? kWriteFault : kUnwrittenBlock;
        offset += moved;
        for (; next < pieces.size() && static_cast<size_t>(moved) >= pieces[next].iov_len; ++next) moved -= static_cast<ssize_t>(pieces[next].iov_len);
        if (moved) {
            pieces[next].iov_base = static_cast<char*>(pieces[next].iov_base) + moved;
            pieces[next].iov_len -= static_cast<size_t>(moved);
        }
    }
    return kSuccess;
}

constexpr u32 kForceUnitAccess = 1u << 30;
constexpr u32 kAllNamespaces = 0xffffffff;

}  // namespace

u32 Controller::execute(const Sqe& sqe) {
    u32 transfer_type = sqe.flags >> 6;
    if (sqe.opcode > kNvmeRead) return kInvalidOpcode;
    if (sqe.flags & 3) return kInvalidField;  // fused commands are not supported
    if (transfer_type > (limits_.sgl ? 1u : 0u)) return kInvalidField;
    if (sqe.nsid != limits_.nsid && !(sqe.opcode == kNvmeFlush && sqe.nsid == kAllNamespaces)) return kInvalidNamespace;
    return sqe.opcode == kNvmeFlush ? flush() : transfer(sqe, sqe.opcode == kNvmeWrite);
}

u32 Controller::flush() {
    std::vector<u64> segments;
    {
        std::lock_guard lock(maps_mutex_);
        for (const auto& [segment, file] : segments_) segments.push_back(segment);
    }
    u32 status = kSuccess;
    for (u64 segment : segments) {
        int fd = use_segment(segment);
        if (fd < 0) continue;
        if (fdatasync(fd)) status = status_of(errno, true);
        leave_segment(segment);
    }
    return status;
}

// The file of a segment, or -1; it stays attached until leave_segment.
int Controller::use_segment(u64 segment) {
    std::lock_guard lock(maps_mutex_);
    auto found = segments_.find(segment);
    if (found == segments_.end()) return -1;
    ++found->second.users;
    return found->second.fd;
}

void Controller::leave_segment(u64 segment) {
    std::lock_guard lock(maps_mutex_);
    if (--segments_.at(segment).users == 0) unused_.notify_all();
}

u32 Controller::transfer(const Sqe& sqe, bool write) {
    u64 blocks = (sqe.cdw12 & 0xffff) + 1;
    u64 length = blocks << limits_.block_shift;
    if (length > limits_.mdts) return kInvalidField;
    if (sqe.lba >= limits_.blocks || blocks > limits_.blocks - sqe.lba) return kLbaOutOfRange;
    std::shared_ptr<const std::vector<MappedRegion>> regions;
    {
        std::lock_guard lock(maps_mutex_);
        regions = regions_;
    }
    BusMemory memory(*regions);
    if (u32 status = memory.add(sqe, length)) return status;
    u64 byte = sqe.lba << limits_.block_shift;
    u64 segment = byte / limits_.segment_size;
    u64 place = byte % limits_.segment_size;
    if (length > limits_.segment_size - place) return kUnwrittenBlock;
    int fd = use_segment(segment);
    if (fd < 0) return kUnwrittenBlock;
    u32 status = move_all(fd, memory.pieces, static_cast<off_t>(place), write, sqe.cdw12 & kForceUnitAccess ? RWF_DSYNC : 0);
    leave_segment(segment);
    std::lock_guard lock(mutex_);
    counts_.bytes += status == kSuccess ? length : 0;
    return status;
}

}  // namespace tutti::gio
