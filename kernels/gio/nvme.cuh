// NVMe as it lies in memory: commands, completions, status codes, data pointers (NVM Express base specification 2.0, §3.3.3, §4.1, §4.2).
#pragma once

#include "abi.cuh"

namespace tutti::gio {

enum Opcode : u8 { kNvmeFlush = 0x00, kNvmeWrite = 0x01, kNvmeRead = 0x02 };

struct alignas(64) Sqe {
    u8 opcode;
    u8 flags;  // bits 7:6 PSDT: 0 PRP, 1 SGL; bits 1:0 fused operation
    u16 cid;
    u32 nsid;
    u64 cdw2;
    u64 metadata;
    u64 data[2];  // PRP1 and PRP2, or one SGL descriptor
    u64 lba;
    u32 cdw12;  // bits 15:0 number of blocks - 1
    u32 cdw13;
    u32 cdw14;
    u32 cdw15;
};
static_assert(sizeof(Sqe) == 64);

struct alignas(16) Cqe {
    u32 dw0;
    u32 dw1;
    u32 sq;    // SQ head, SQ identifier
    u32 last;  // command identifier, phase (bit 16), status (bits 31:17): all that the mover reads, so one load is one whole answer
};
static_assert(sizeof(Cqe) == 16);

constexpr u8 kSglFlags = 1u << 6;

struct alignas(16) SglDescriptor {
    u64 address;
    u64 word;  // bytes in the low half; type in bits 63:60, subtype in bits 59:56
};
static_assert(sizeof(SglDescriptor) == 16);

enum SglType : u32 { kDataBlock = 0, kSegment = 2, kLastSegment = 3 };  // subtype 0: the address is one
constexpr u64 kSglTypeShift = 60;

// Status: SC in bits 7:0, SCT in bits 10:8.
enum Status : u32 {
    kSuccess = 0x000,
    kInvalidOpcode = 0x001,
    kInvalidField = 0x002,
    kCommandIdConflict = 0x003,
    kDataTransferError = 0x004,
    kInternalError = 0x006,
    kAbortedBySqDeletion = 0x008,
    kInvalidNamespace = 0x00b,
    kInvalidSglSegment = 0x00d,
    kInvalidSglCount = 0x00e,
    kSglLengthInvalid = 0x00f,
    kSglTypeInvalid = 0x011,
    kPrpOffsetInvalid = 0x013,
    kLbaOutOfRange = 0x080,
    kCapacityExceeded = 0x081,
    kWriteFault = 0x280,
    kUnrecoveredRead = 0x281,
    kUnwrittenBlock = 0x287,
    kVendorErrno = 0x700,  // of the software controller alone: the low byte is an errno of the host
};
constexpr u32 kStatusMask = 0x7ff;  // without CRD, More and DNR

// The errno of a code; Linux maps NVMe's own codes alike (drivers/nvme/host/core.c, nvme_error_status), but for media errors, which stay EIO.
GIO_FUNCTION i32 errno_of(u32 code) {
    switch (code) {
        case kCancelled: return 125;    // ECANCELED
        case kNoSlot: return 110;       // ETIMEDOUT
        case kBadAddress: return 14;    // EFAULT
        case kBadRange: return 9;       // EBADF
        case kBadRequest: return 22;    // EINVAL
    }
    switch (code & kStatusMask) {
        case kDataTransferError: return 14;
        case kUnwrittenBlock: return 9;
        case kCapacityExceeded: return 28;  // ENOSPC
        case kLbaOutOfRange: return 22;
    }
    return 5;  // EIO
}

// Points `sqe` at `count` data blocks, whose descriptors lie at `bus`: one last segment, of any length, since it is contiguous there.
GIO_FUNCTION void set_list(Sqe& sqe, u64 bus, u32 count) {
    sqe.flags = kSglFlags;
    sqe.data[0] = bus;
    sqe.data[1] = static_cast<u64>(kLastSegment) << kSglTypeShift | count * sizeof(SglDescriptor);
}

// Points `sqe` at `length` > 0 bytes of `region` from `bus` on. False when they need a PRP list and there is none, or one entry too many.
GIO_FUNCTION bool set_data(Sqe& sqe, const MappedRegion& region, u64 bus, u32 length, bool sgl) {
    sqe.data[0] = bus;
    if (sgl) {
        sqe.flags = kSglFlags;
        sqe.data[1] = length;  // and type 0, subtype 0 in the high byte
        return true;
    }
    u32 first = kPage - static_cast<u32>(bus & (kPage - 1));  // PRP1 alone may start inside a page
    if (length <= first) {
        sqe.data[1] = 0;
        return true;
    }
    u64 second = bus + first;
    u32 pages = (length - first + kPage - 1) / kPage;
    if (pages == 1) {
        sqe.data[1] = second;
        return true;
    }
    u64 page = (second - region.bus) / kPage;
    sqe.data[1] = region.prp + page / kPrpWindow * kPage + page % kPrpWindow * sizeof(u64);
    return region.prp != 0 && pages <= kPrpWindow;
}

}  // namespace tutti::gio
