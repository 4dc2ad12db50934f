// What the controller does with a command: the checks of the specification, then the bytes.
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include "bus_memory.hpp"
#include "controller.hpp"

namespace tutti::gio {

namespace {

// The status for an errno of the host; what NVMe has no word for goes out as a vendor's code, 0x700 | errno.
u32 status_of(int error, bool write) {
    switch (error) {
        case ENOSPC: return kCapacityExceeded;
        case EFAULT: return kDataTransferError;
        case EIO: return write ? kWriteFault : kUnrecoveredRead;
        default: return kVendorErrno | static_cast<u32>(error);
    }
}

void skip(std::vector<iovec>& pieces, u64 size) {
    size_t done = 0;
    for (; done < pieces.size() && size >= pieces[done].iov_len; ++done) size -= pieces[done].iov_len;
    pieces.erase(pieces.begin(), pieces.begin() + static_cast<std::ptrdiff_t>(done));
    if (!size) return;
    pieces[0].iov_base = static_cast<char*>(pieces[0].iov_base) + size;
    pieces[0].iov_len -= size;
}

u64 bytes_of(const std::vector<iovec>& pieces) {
    u64 size = 0;
    for (const iovec& piece : pieces) size += piece.iov_len;
    return size;
}

// Only the first `limit` bytes.
void cut(std::vector<iovec>& pieces, u64 limit) {
    size_t kept = 0;
    for (; kept < pieces.size() && limit; ++kept) {
        pieces[kept].iov_len = std::min<size_t>(pieces[kept].iov_len, limit);
        limit -= pieces[kept].iov_len;
    }
    pieces.resize(kept);
}

// Whether a system call may be asked for this memory. A drive takes any dword, O_DIRECT only whole blocks.
bool fits_direct_io(int fd, const std::vector<iovec>& pieces) {
    auto whole = [](const iovec& piece) { return (reinterpret_cast<u64>(piece.iov_base) | piece.iov_len) % kPage == 0; };
    return std::ranges::all_of(pieces, whole) || !(fcntl(fd, F_GETFL) & O_DIRECT);
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
    std::vector<u64> numbers;
    {
        std::lock_guard lock(maps_mutex_);
        for (const auto& [number, segment] : segments_) numbers.push_back(number);
    }
    u32 status = kSuccess;
    for (u64 number : numbers) {
        std::shared_ptr<Segment> segment = use_segment(number);
        if (!segment) continue;
        if (fdatasync(segment->fd)) status = status_of(errno, true);
        leave_segment(*segment);
    }
    return status;
}

// The segment's file, or null; it stays the caller's until leave_segment.
std::shared_ptr<Controller::Segment> Controller::use_segment(u64 number) {
    std::lock_guard lock(maps_mutex_);
    auto found = segments_.find(number);
    if (found == segments_.end()) return nullptr;
    ++found->second->users;
    return found->second;
}

void Controller::leave_segment(Segment& segment) {
    std::lock_guard lock(maps_mutex_);
    if (--segment.users == 0) unused_.notify_all();
}

// Moves all bytes, resuming short transfers. A file that ends early has no such block.
u32 Controller::move(const Segment& segment, std::vector<iovec> pieces, u64 place, bool write, int flags) {
    while (!pieces.empty()) {
        u64 from = segment.number * limits_.segment_size + place;
        const Verdict verdict = bad_blocks_.judge(static_cast<u16>(drive_), from, from + bytes_of(pieces), write);
        for (u64 until = now_ns() + Faults::kStallNs; verdict.stalls && !bad_blocks_.gate_open() && now_ns() < until;)
            std::this_thread::sleep_for(std::chrono::microseconds(Faults::kPollUs));
        if (verdict.delay_us) std::this_thread::sleep_for(std::chrono::microseconds(verdict.delay_us));
        std::vector<iovec> some = pieces;
        cut(some, verdict.limit);
        i64 moved = verdict.answer ? *verdict.answer : call(segment, some, place, write, flags);
        if (moved == -EINTR) continue;
        if (moved <= 0) return status_of(moved ? static_cast<int>(-moved) : EIO, write);
        place += static_cast<u64>(moved);
        skip(pieces, static_cast<u64>(moved));
    }
    return kSuccess;
}

// One system call: bytes, or -errno.
i64 Controller::call(const Segment& segment, const std::vector<iovec>& pieces, u64 place, bool write, int flags) {
    std::vector<iovec> memory = pieces;
    std::unique_ptr<char, decltype(&std::free)> bounce(nullptr, std::free);
    if (!fits_direct_io(segment.fd, pieces)) {
        u64 size = bytes_of(pieces);
        bounce.reset(static_cast<char*>(std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage)));
        if (!bounce) return -ENOMEM;
        memory = {{bounce.get(), size}};
    }
    char* at = bounce.get();
    if (bounce && write)
        for (const iovec& piece : pieces) at = std::copy_n(static_cast<const char*>(piece.iov_base), piece.iov_len, at);
    int count = static_cast<int>(memory.size());
    off_t offset = static_cast<off_t>(place);
    i64 moved = write ? pwritev2(segment.fd, memory.data(), count, offset, flags) : preadv2(segment.fd, memory.data(), count, offset, 0);
    if (moved < 0) return -errno;
    if (bounce && !write) {
        std::vector<iovec> came = pieces;
        cut(came, static_cast<u64>(moved));
        for (const iovec& piece : came) {
            std::copy_n(at, piece.iov_len, static_cast<char*>(piece.iov_base));
            at += piece.iov_len;
        }
    }
    return moved;
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
    std::shared_ptr<Segment> file = use_segment(segment);
    if (!file) return kUnwrittenBlock;
    u32 status = move(*file, std::move(memory.pieces), place, write, sqe.cdw12 & kForceUnitAccess ? RWF_DSYNC : 0);
    leave_segment(*file);
    std::lock_guard lock(mutex_);
    counts_.bytes += status == kSuccess ? length : 0;
    return status;
}

}  // namespace tutti::gio
