// What Python sees of this library: plain C functions, called through ctypes. Arrays are C-contiguous, sizes in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../faults.hpp"

#define TUTTI_API extern "C" __attribute__((visibility("default")))

/// Raised with every change of a signature or structure below; kernels/native.py refuses another number.
constexpr std::uint32_t kAbi = 11;

TUTTI_API std::uint32_t tutti_abi() noexcept;

/// IOCTX_DTYPE of tutti_sglang/engine/batch.py.
struct tutti_ioctx {
    std::uint64_t address, offset;
    std::uint32_t length;
    std::int32_t result;
    std::uint16_t drive;
    std::uint8_t operation, klass;
    std::uint32_t tag;
};
static_assert(sizeof(tutti_ioctx) == 32);

struct tutti_options {
    std::uint64_t segment_size;                   // bytes
    std::uint64_t staging_address, staging_size;  // memory worth registering; size 0: none
    std::uint32_t max_io;                         // bytes of one transfer
    std::uint32_t queue_depth;                    // transfers in flight per drive
    std::uint32_t workers;                        // threads per drive where io_uring is refused
    std::uint32_t pool;                           // 1: do not even try io_uring
    const tutti::FaultPlan *faults;               // null: none
};

/// Objects by where they lie: n slots of k segments, all with the same tensors.
struct tutti_objects {
    const std::uint64_t *numbers;      // (n,) slot in its segment
    const std::uint32_t *places;       // (n,) which of the segments
    const std::uint64_t *segments;     // (k,) their numbers
    const std::uint64_t *const *maps;  // (k,) Geometry.packed of each
    const std::uint32_t *tensors;      // (t,) those to move, ascending; in staging they follow one another
    std::uint64_t count, tensor_count;
};

/// What became of I/O contexts.
struct tutti_moved {
    tutti_ioctx *failed;           // room for all; those that did not move whole, with their results
    std::uint64_t failed_count;
    std::uint64_t *counts, *bytes; // by drive ordinal: contexts that were submitted, and their bytes; added to
};

/// A read of many objects through little staging: piece i lies where piece i - lane_count lay before.
struct tutti_read {
    tutti_objects objects;
    const std::uint64_t *rows;   // (n, t) where the tensors are to be copied
    const std::uint64_t *sizes;  // (t,) bytes of each
    const std::uint64_t *roots;  // (n,) what XXH3-64 of an object's row of checksums must be; null: do not compare
    const std::uint64_t *lanes;  // (lane_count,) addresses of `step` objects each
    std::uint64_t *places;       // (lane_count, step, t) where in its lane each tensor of the piece lies; of the library
    std::uint64_t lane_count, step;
    std::uint64_t started;  // pieces under way or ended, of an earlier call and then of this one; 0 at first
    std::int64_t deadline;
    std::uint32_t klass;
    std::uint32_t straight;       // 1: the drives write whole blocks into the rows; lanes are counted, and their memory is not used
    std::uint8_t *states;         // (n,) tutti_state
    tutti_moved moved;
    struct tutti_ticket **open;   // (lane_count,) null but for pieces whose memory the drives still own: their tickets
    std::uint32_t *open_contexts; // (lane_count,) how many contexts these have
};

/// Of an object that was to be read: never asked for, in its rows, there with another root, or with contexts among the failed.
enum tutti_state : std::uint8_t { kNever, kWhole, kAltered, kFailed };

struct tutti_counters {
    std::uint64_t contexts, transfers, bytes, resumed, retried;
};

// engine.cpp. Times are nanoseconds, points in time those of CLOCK_MONOTONIC.

struct tutti_engine;
struct tutti_ticket;

/// 0, or the errno with which io_uring is refused on this machine.
TUTTI_API int tutti_uring_probe() noexcept;
/// Never null; threads and rings start with the first file of a drive.
TUTTI_API tutti_engine *tutti_engine_open(const tutti_options *options) noexcept;
/// 0 while io_uring is in use; else the errno that made the thread pool take over, of the probe or of some drive.
TUTTI_API int tutti_engine_refused(tutti_engine *engine) noexcept;
/// Staging memory that the drives accepted as registered, in bytes, of the drive that has most.
TUTTI_API std::uint64_t tutti_engine_registered(tutti_engine *engine) noexcept;
/// 0, -EEXIST, -ESHUTDOWN, or -EAGAIN when there is no thread to be had.
TUTTI_API int tutti_engine_attach(tutti_engine *engine, std::uint16_t drive, std::uint32_t segment, int fd) noexcept;
/// 1, or 0 when a transfer has not ended in time.
TUTTI_API int tutti_engine_detach(tutti_engine *engine, std::uint16_t drive, std::uint32_t segment, std::int64_t timeout) noexcept;
/// Null after close. The contexts are copied.
TUTTI_API tutti_ticket *tutti_engine_submit(tutti_engine *engine, const tutti_ioctx *contexts, std::size_t n, unsigned klass,
                                            std::int64_t deadline) noexcept;
/// Results to `out` (n,). 1 when all are final.
TUTTI_API int tutti_engine_wait(tutti_engine *engine, tutti_ticket *ticket, std::int64_t timeout, std::int32_t *out) noexcept;
/// Plan, submit, wait, copy and compare, all of it. `open` is zeroed by the caller. `ahead` (or null) is only begun, as far as its lanes
/// go and once all of `read` is under way: rows and roots are not looked at, its tickets are left in `open`. A later call may end it.
/// A straight read has no roots, and ends when the drives have: after the deadline, what has not begun is given up.
TUTTI_API void tutti_engine_read(tutti_engine *engine, tutti_read *read, tutti_read *ahead) noexcept;
/// Plan and submit the tensors of objects, which lie at (n, t) `rows`; their contexts have the number of the object as tag.
/// Null after close.
TUTTI_API tutti_ticket *tutti_engine_launch(tutti_engine *engine, const tutti_objects *objects, const std::uint64_t *rows,
                                            unsigned operation, unsigned klass, std::int64_t deadline) noexcept;
/// As wait, but tells only what failed. 1 when all are final.
TUTTI_API int tutti_engine_land(tutti_engine *engine, tutti_ticket *ticket, std::int64_t timeout, tutti_moved *moved) noexcept;
/// The contexts that `launch` submits, to `out` (n * t,); result: their number.
TUTTI_API std::uint64_t tutti_plan(const tutti_objects *objects, const std::uint64_t *rows, std::uint64_t segment_size,
                                   unsigned operation, unsigned klass, tutti_ioctx *out) noexcept;
/// As wait, without waiting.
TUTTI_API int tutti_engine_poll(tutti_engine *engine, tutti_ticket *ticket, std::int32_t *out) noexcept;
TUTTI_API int tutti_ticket_done(tutti_ticket *ticket) noexcept;
TUTTI_API void tutti_engine_cancel(tutti_engine *engine, tutti_ticket *ticket) noexcept;
/// The caller has no more use for the ticket; its transfers go on.
TUTTI_API void tutti_ticket_release(tutti_ticket *ticket) noexcept;
/// 1, or 0 when transfers are still in flight: their threads stay until these end.
TUTTI_API int tutti_engine_close(tutti_engine *engine, std::int64_t timeout) noexcept;
/// After close only.
TUTTI_API void tutti_engine_free(tutti_engine *engine) noexcept;
/// The sum over all drives.
TUTTI_API void tutti_engine_counters(tutti_engine *engine, tutti_counters *out) noexcept;

// copy.cpp: rows are (n, T) addresses, `sizes` (T,) > 0; source and destination rows do not overlap.

/// Copy `sizes[t]` bytes from `src[i, t]` to `dst[i, t]`.
TUTTI_API void tutti_copy_rows(const std::uint64_t *dst, const std::uint64_t *src, const std::uint64_t *sizes, std::size_t n,
                               std::size_t tensors) noexcept;

/// As tutti_copy_rows, and the tensor checksums of the very bytes that were copied to `out` (n, T).
TUTTI_API void tutti_copy_and_sum(const std::uint64_t *dst, const std::uint64_t *src, const std::uint64_t *sizes, std::size_t n,
                                  std::size_t tensors, std::uint64_t *out) noexcept;

/// Tensor checksums without a copy.
TUTTI_API void tutti_sums(const std::uint64_t *rows, const std::uint64_t *sizes, std::size_t n, std::size_t tensors,
                          std::uint64_t *out) noexcept;

/// XXH3-64 of each row of `table` (n, T) to `out` (n,).
TUTTI_API void tutti_roots(const std::uint64_t *table, std::size_t n, std::size_t tensors, std::uint64_t *out) noexcept;

/// XXH3-64 of `size` bytes.
TUTTI_API std::uint64_t tutti_xxh3(const void *data, std::size_t size) noexcept;

// pages.cpp

/// Token slots (pages * page_size,) to page numbers (pages,) below `end`. 1, or 0 when they are not whole, aligned pages.
TUTTI_API int tutti_pages(const std::int64_t *slots, std::size_t pages, std::int64_t page_size, std::int64_t end,
                          std::int64_t *out) noexcept;

/// Page numbers (n,) to addresses (n, T): base[t] + page * stride[t].
TUTTI_API void tutti_page_rows(const std::int64_t *pages, std::size_t n, const std::uint64_t *base, const std::uint64_t *stride,
                               std::size_t tensors, std::uint64_t *out) noexcept;

// table.cpp

/// Ascending marks and their slots. Those whose highest 64 - shift bits, as a signed number, are b - 2^(63 - shift) begin at starts[b].
struct tutti_table {
    const std::int64_t *marks, *slots;
    const std::int64_t *starts;  // 2^(64 - shift) + 1, the last of them the number of marks
    std::uint32_t shift;         // 1 to 63
};

/// XXH3-64 of a namespace (u64) and each of the keys (n, 32) to `out` (n,).
TUTTI_API void tutti_marks(std::uint32_t name, const std::uint8_t *keys, std::size_t n, std::uint64_t *out) noexcept;

/// Slots of marks (n,), in any order, to `out` (n,); `absent` where there is none.
TUTTI_API void tutti_find(const tutti_table *table, const std::int64_t *marks, std::size_t n, std::int64_t absent,
                          std::int64_t *out) noexcept;
