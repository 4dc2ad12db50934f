// The part of the kernel's io_uring ABI that is used here, as in include/uapi/linux/io_uring.h. Written out so that the build
// depends neither on liburing nor on how new the system's headers are.
#pragma once

#include <cstdint>

namespace tutti::abi {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = std::uint64_t;

// The same numbers on every architecture.
constexpr long kSetup = 425, kEnter = 426, kRegister = 427;

struct Sqe {
    u8 opcode, flags;
    u16 ioprio;
    i32 fd;
    u64 offset;
    u64 address;
    u32 length;  // bytes, or iovecs
    u32 op_flags;
    u64 user_data;
    u16 buffer;
    u16 personality;
    u32 splice_fd;
    u64 unused[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
    u64 user_data;
    i32 result;
    u32 flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
    u32 head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    u64 user_address;
};

struct CqOffsets {
    u32 head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    u64 user_address;
};

struct Params {
    u32 sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

enum Opcode : u8 { kReadv = 1, kWritev = 2, kReadFixed = 4, kWriteFixed = 5, kTimeout = 11, kRead = 22, kWrite = 23 };

enum SqeFlag : u8 { kFixedFile = 1 << 0 };

enum SetupFlag : u32 { kClamp = 1 << 4, kSubmitAll = 1 << 7, kCoopTaskrun = 1 << 8, kSingleIssuer = 1 << 12, kDeferTaskrun = 1 << 13 };

enum Feature : u32 { kSingleMmap = 1 << 0, kNoDrop = 1 << 1, kRwCurPos = 1 << 3 };

enum EnterFlag : u32 { kGetEvents = 1 << 0 };

enum RegisterOpcode : u32 { kRegisterFiles = 2, kUpdateFiles = 6, kProbe = 8, kRegisterBuffers = 15, kUpdateBuffers = 16 };

constexpr u64 kOffsetRing = 0, kOffsetSqes = 0x10000000;

struct FilesUpdate {
    u32 offset, reserved;
    u64 fds;
};

struct RsrcRegister {
    u32 count, flags;
    u64 reserved, data, tags;
};
constexpr u32 kSparse = 1 << 0;

struct RsrcUpdate {
    u32 offset, reserved;
    u64 data, tags;
    u32 count, reserved2;
};

struct Timespec {
    std::int64_t seconds;
    long long nanoseconds;
};

struct ProbeOp {
    u8 opcode, reserved;
    u16 flags;
    u32 reserved2;
};
constexpr u16 kSupported = 1 << 0;

struct Probe {
    u8 last_opcode, count;
    u16 reserved;
    u32 reserved2[3];
    ProbeOp ops[64];
};

}  // namespace tutti::abi
