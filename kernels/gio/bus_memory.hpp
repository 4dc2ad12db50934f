// The memory that a command names, found as a controller finds it: through the IOMMU's map and the rules for PRP entries and SGL descriptors
// (NVM Express base specification 2.0, §4.1.1 and §4.1.2).
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "nvme.cuh"

namespace tutti::gio {

class BusMemory {
public:
    explicit BusMemory(const std::vector<MappedRegion>& regions) : regions_(regions) {}

    std::vector<iovec> pieces;

    // Adds the `length` bytes that `sqe` names. The status of the command if it breaks a rule, 0 otherwise.
    u32 add(const Sqe& sqe, u64 length) {
        if (sqe.flags & kSglFlags) return add_sgl(sqe, length);
        if (sqe.data[0] & 3) return kPrpOffsetInvalid;
        u64 first = std::min<u64>(length, kPage - sqe.data[0] % kPage);
        if (!append(sqe.data[0], first)) return kDataTransferError;
        u64 rest = length - first;
        if (rest > kPage) return add_prp_list(sqe.data[1], rest);
        if (rest == 0) return kSuccess;
        if (sqe.data[1] % kPage) return kPrpOffsetInvalid;
        return append(sqe.data[1], rest) ? kSuccess : kDataTransferError;
    }

private:
    static constexpr size_t kMaxPieces = 1024;  // IOV_MAX
    static constexpr u32 kMaxDescriptors = 65536;

    static u32 type_of(const SglDescriptor& it) { return static_cast<u32>(it.word >> kSglTypeShift); }
    static u64 length_of(const SglDescriptor& it) { return it.word & 0xffffffff; }
    static bool is_segment(const SglDescriptor& it) { return type_of(it) == kSegment || type_of(it) == kLastSegment; }

    u32 add_sgl(const Sqe& sqe, u64 length) {
        SglDescriptor next{sqe.data[0], sqe.data[1]};
        u64 rest = length;
        if (!is_segment(next)) {
            u32 status = add_block(next, rest);
            return status || !rest ? status : kSglLengthInvalid;
        }
        for (bool last = false; !last;)
            if (u32 status = add_segment(next, rest, last)) return status;
        return rest ? kSglLengthInvalid : kSuccess;
    }

    // The descriptors of a segment; `next` becomes the segment that follows, unless this is the `last`.
    u32 add_segment(SglDescriptor& next, u64& rest, bool& last) {
        u64 size = length_of(next), list = next.address;
        last = type_of(next) == kLastSegment;
        if (next.word >> 56 & 15) return kSglTypeInvalid;
        if (list & 7 || size == 0 || size % sizeof(SglDescriptor)) return kInvalidSglSegment;
        for (u64 at = 0; at < size; at += sizeof(SglDescriptor)) {
            if (++descriptors_ > kMaxDescriptors) return kInvalidSglCount;  // a chain need not end
            const char* place = translate(list + at, sizeof(SglDescriptor));
            if (!place) return kDataTransferError;
            SglDescriptor it;
            std::memcpy(&it, place, sizeof it);
            bool points = !last && at + sizeof it == size;  // what ends a segment that is not the last, and only that, is a further one
            if (points && !is_segment(it)) return kInvalidSglSegment;
            if (!points && is_segment(it)) return kInvalidSglCount;
            if (points) next = it;
            else if (u32 status = add_block(it, rest)) return status;
        }
        return kSuccess;
    }

    u32 add_block(const SglDescriptor& it, u64& rest) {
        if (it.word >> 56) return kSglTypeInvalid;
        u64 length = length_of(it);
        if (length > rest) return kSglLengthInvalid;
        rest -= length;
        return length == 0 || append(it.address, length) ? kSuccess : kDataTransferError;
    }

    u32 add_prp_list(u64 list, u64 rest) {
        if (list & 7) return kPrpOffsetInvalid;
        while (rest) {
            u64 entry;
            const char* place = translate(list, sizeof entry);
            if (!place) return kDataTransferError;
            std::memcpy(&entry, place, sizeof entry);
            if (entry % kPage) return kPrpOffsetInvalid;
            if (list % kPage == kPage - sizeof entry && rest > kPage) {  // the last of its page: it points to the next page of the list
                list = entry;
                continue;
            }
            u64 now = std::min<u64>(rest, kPage);
            if (!append(entry, now)) return kDataTransferError;
            rest -= now;
            list += sizeof entry;
        }
        return kSuccess;
    }

    bool append(u64 bus, u64 length) {
        char* place = translate(bus, length);
        if (!place) return false;
        if (!pieces.empty() && static_cast<char*>(pieces.back().iov_base) + pieces.back().iov_len == place) pieces.back().iov_len += length;
        else pieces.push_back({place, length});
        return pieces.size() <= kMaxPieces;
    }

    char* translate(u64 bus, u64 length) const {
        for (const MappedRegion& region : regions_) {
            u64 place = bus - region.bus;
            if (place < region.size && length <= region.size - place) return reinterpret_cast<char*>(region.address + place);
        }
        return nullptr;
    }

    const std::vector<MappedRegion>& regions_;
    u32 descriptors_ = 0;
};

}  // namespace tutti::gio
