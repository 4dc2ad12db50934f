// The memory that the host, the mover (GPU kernel or CPU threads) and a controller share. Mirrored in tutti_sglang/gio/abi.py; both sides
// assert sizes and offsets, and tests/gio/test_abi.py compares the two. Little-endian, addresses as u64, all zero = the initial state.
#pragma once

#include "platform.cuh"

namespace tutti::gio {

constexpr u32 kIocbContexts = 2048;   // IOCTX in an IOCB (paper, gio_uring)
constexpr u32 kIocbPieces = 8192;     // sub-I/Os in an IOCB
constexpr u32 kQueueEntries = 1024;   // entries of the largest queue
constexpr u32 kPage = 4096;           // the controller's memory page: CC.MPS = 0
constexpr u32 kPrpWindow = 256;       // entries of a PRP list that are always usable, see MappedRegion

constexpr u32 kJoined = 128;          // IOCTX that one command moves at most: as many data blocks as Linux gives a command (NVME_MAX_SEGS)

// A word of an IOCB's map: (IOCTX joined - 1) << kJoinShift | piece << kContextBits | IOCTX. What is joined has one piece each.
constexpr u32 kContextBits = 11;
constexpr u32 kJoinShift = 24;
static_assert(1u << kContextBits == kIocbContexts && kIocbPieces <= 1u << (kJoinShift - kContextBits) && kJoined <= 1u << (32 - kJoinShift));

enum Operation : u8 { kRead = 0, kWrite = 1, kFlush = 2 };

// One I/O context; `offset` counts in the drive's own space. tutti_sglang/engine/batch.py has the same.
struct alignas(32) Ioctx {
    u64 address;
    u64 offset;
    u32 length;
    i32 result;  // bytes moved, or -errno; -EINPROGRESS until then
    u16 drive;
    u8 operation;
    u8 klass;
    u32 tag;
};
static_assert(sizeof(Ioctx) == 32);

// One I/O control block. The host writes it before it issues it; the mover writes `status` and `contexts[].result`.
struct alignas(4096) Iocb {
    u64 serial;    // names this use of the block; the mover repeats it in the Completion
    u64 claim_ns;  // a sub-I/O that got no command slot for so long ends with -ETIMEDOUT
    u64 poll_ns;   // a command without a CQE for so long is left to whoever sees its CQE later
    u32 count;     // IOCTX
    u32 pieces;    // sub-I/Os
    u32 cancel;    // non-zero: what has not started ends with -ECANCELED
    alignas(4096) u16 status[kIocbContexts];  // code of the first failed piece: NVMe status (15 bits) or a Local code
    alignas(4096) u32 map[kIocbPieces];       // sub-I/O → (IOCTX joined, piece, IOCTX)
    alignas(4096) Ioctx contexts[kIocbContexts];
};
static_assert(sizeof(Iocb) == 106496);

// One entry of the completion ring, by IOCB. Complete when `serial` is the IOCB's.
struct alignas(16) Completion {
    u64 serial;
    u32 errors;  // IOCTX that failed
    u32 reserved;
};
static_assert(sizeof(Completion) == 16);

// The mover's own account of an IOCB in flight, in its local memory. All zero between two uses: the last to use a word clears it.
struct alignas(64) IocbWork {
    u32 finished;                        // IOCTX
    u32 errors;                          // IOCTX
    alignas(64) u32 done[kIocbContexts];  // code of the first failed piece << 16 | pieces done
};
static_assert(sizeof(IocbWork) == 64 + 4 * kIocbContexts);

// Memory that controllers may read and write: `address` of the mover → `bus` of the controller, both page aligned and contiguous (an IOMMU
// makes them so). `prp`: bus address of a table that holds the PRP list of every run of pages in it. Table page p lists the 512 data pages
// from 256 p on, so a list of up to 256 entries that starts anywhere lies in one table page, never reaches its last entry, and needs no
// pointer to a next list page.
struct MappedRegion {
    u64 address;
    u64 size;
    u64 bus;
    u64 prp;  // 0: none, transfers of more than two pages then need SGL
};
static_assert(sizeof(MappedRegion) == 32);

// What a controller is asked to do with one command slot.
struct Command {
    u32 word;  // Idle, Pending, Late, or Done | status
    u32 iocb;
    u32 context;
    u32 joined;  // IOCTX that it moves, from `context` on
};
enum CommandWord : u32 { kIdle = 0, kPending = 1, kLate = 2, kDone = 0x80000000u };

// A queue pair's state, in the mover's local memory. Words that different threads hammer have a cache line each.
struct alignas(64) QueueState {
    u32 next;                                       // the next ticket
    alignas(64) u32 sq_lock;                        // guards the next two
    u32 tail;                                       // tickets below it are announced
    u32 doorbells;                                  // writes of the SQ doorbell so far
    alignas(64) u32 cq_lock;                        // guards the next two
    u32 head;                                       // CQEs taken so far
    u32 stray;                                      // CQEs that no command waited for
    alignas(64) u32 late;                           // commands left to whoever sees their CQE
    alignas(64) u32 in_use[kQueueEntries / 32];     // a bit per command identifier
    alignas(64) u32 ready[kQueueEntries];           // ticket + 1 of the SQE that lies ready in this entry
    alignas(64) Command commands[kQueueEntries];    // by command identifier
};
static_assert(sizeof(QueueState) == 4 * 64 + 128 + 4 * kQueueEntries + 16 * kQueueEntries);

struct QueuePair {
    u64 sq;           // Sqe[entries]
    u64 cq;           // Cqe[entries]
    u64 sq_doorbell;  // u32
    u64 cq_doorbell;  // u32
    u64 state;        // QueueState
    u32 log_entries;
    u32 reserved;
};
static_assert(sizeof(QueuePair) == 48);

struct Drive {
    u64 queues;       // QueuePair[queue_count]
    u64 first_block;  // the store's range of LBAs: nothing outside it is ever touched
    u64 blocks;
    u32 queue_count;
    u32 nsid;
    u32 mdts;         // bytes a command moves at most
    u8 block_shift;
    u8 sgl;           // 1: the controller takes SGLs
    u16 reserved;
};
static_assert(sizeof(Drive) == 40);

// Everything a mover needs to know; constant while it runs.
struct Context {
    u64 iocbs;        // Iocb[depth]
    u64 works;        // IocbWork[depth]
    u64 completions;  // Completion[depth]
    u64 regions;      // MappedRegion[region_count]
    u64 drives;       // Drive[drive_count]
    u64 lists;        // SglDescriptor[depth][kIocbContexts], or 0: then only what is contiguous in memory is joined
    u64 lists_bus;    // the same for controllers
    u32 depth;
    u32 region_count;
    u32 drive_count;
    u32 reserved;
};
static_assert(sizeof(Context) == 72);

// Codes of our own beside NVMe's 15-bit status.
enum Local : u32 {
    kCancelled = 0x8001,  // -ECANCELED
    kNoSlot = 0x8002,     // -ETIMEDOUT: every command slot stayed taken
    kBadAddress = 0x8003, // -EFAULT: not in a mapped region
    kBadRange = 0x8004,   // -EBADF: no such drive, or outside the store's blocks
    kBadRequest = 0x8005, // -EINVAL: not whole blocks, or an unknown operation
};

}  // namespace tutti::gio
