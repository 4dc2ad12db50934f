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

    u32 add_sgl(const Sqe& sqe, u64 length) {
        u32 type = static_cast<u32>(sqe.data[1] >> kSglTypeShift);
        if (type == 2 || type == 3) return kInvalidSglSegment;  // chains of descriptors are not supported
        if (sqe.data[1] >> 56) return kSglTypeInvalid;
        if ((sqe.data[1] & 0xffffffff) != length) return kSglLengthInvalid;
        return append(sqe.data[0], length) ? kSuccess : kDataTransferError;
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
};

}  // namespace tutti::gio
