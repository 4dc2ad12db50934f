// What Python sees of the software controller and of the CPU twin (kernels/gio_native.py): plain functions over opaque pointers.
#include <cstddef>
#include <cstring>

#include "controller.hpp"
#include "relay.hpp"
#include "twin.hpp"

using namespace tutti::gio;
using tutti::FaultPlan;

namespace {

struct Field {
    const char* name;
    u64 offset;
    u64 size;
};

#define GIO_TYPE(type) {#type, 0, sizeof(type)}
#define GIO_FIELD(type, field) {#type "." #field, offsetof(type, field), sizeof(type::field)}

// Every structure that Python mirrors: type, then its fields.
constexpr Field kFields[] = {
    GIO_TYPE(Ioctx), GIO_FIELD(Ioctx, address), GIO_FIELD(Ioctx, offset), GIO_FIELD(Ioctx, length), GIO_FIELD(Ioctx, result),
    GIO_FIELD(Ioctx, drive), GIO_FIELD(Ioctx, operation), GIO_FIELD(Ioctx, klass), GIO_FIELD(Ioctx, tag),
    GIO_TYPE(Iocb), GIO_FIELD(Iocb, serial), GIO_FIELD(Iocb, claim_ns), GIO_FIELD(Iocb, poll_ns), GIO_FIELD(Iocb, count),
    GIO_FIELD(Iocb, pieces), GIO_FIELD(Iocb, cancel), GIO_FIELD(Iocb, status), GIO_FIELD(Iocb, map), GIO_FIELD(Iocb, contexts),
    GIO_TYPE(Completion), GIO_FIELD(Completion, serial), GIO_FIELD(Completion, errors),
    GIO_TYPE(IocbWork), GIO_FIELD(IocbWork, finished), GIO_FIELD(IocbWork, errors), GIO_FIELD(IocbWork, done),
    GIO_TYPE(MappedRegion), GIO_FIELD(MappedRegion, address), GIO_FIELD(MappedRegion, size), GIO_FIELD(MappedRegion, bus),
    GIO_FIELD(MappedRegion, prp),
    GIO_TYPE(Command), GIO_FIELD(Command, word), GIO_FIELD(Command, iocb), GIO_FIELD(Command, context), GIO_FIELD(Command, joined),
    GIO_TYPE(QueueState), GIO_FIELD(QueueState, next), GIO_FIELD(QueueState, sq_lock), GIO_FIELD(QueueState, tail),
    GIO_FIELD(QueueState, doorbells), GIO_FIELD(QueueState, cq_lock), GIO_FIELD(QueueState, head), GIO_FIELD(QueueState, stray),
    GIO_FIELD(QueueState, late), GIO_FIELD(QueueState, in_use), GIO_FIELD(QueueState, ready), GIO_FIELD(QueueState, commands),
    GIO_TYPE(QueuePair), GIO_FIELD(QueuePair, sq), GIO_FIELD(QueuePair, cq), GIO_FIELD(QueuePair, sq_doorbell),
    GIO_FIELD(QueuePair, cq_doorbell), GIO_FIELD(QueuePair, state), GIO_FIELD(QueuePair, log_entries),
    GIO_TYPE(Drive), GIO_FIELD(Drive, queues), GIO_FIELD(Drive, first_block), GIO_FIELD(Drive, blocks), GIO_FIELD(Drive, queue_count),
    GIO_FIELD(Drive, nsid), GIO_FIELD(Drive, mdts), GIO_FIELD(Drive, block_shift), GIO_FIELD(Drive, sgl),
    GIO_TYPE(Context), GIO_FIELD(Context, iocbs), GIO_FIELD(Context, works), GIO_FIELD(Context, completions), GIO_FIELD(Context, regions),
    GIO_FIELD(Context, drives), GIO_FIELD(Context, lists), GIO_FIELD(Context, lists_bus), GIO_FIELD(Context, depth), GIO_FIELD(Context, region_count), GIO_FIELD(Context, drive_count),
    GIO_TYPE(Sqe), GIO_FIELD(Sqe, opcode), GIO_FIELD(Sqe, flags), GIO_FIELD(Sqe, cid), GIO_FIELD(Sqe, nsid), GIO_FIELD(Sqe, data),
    GIO_FIELD(Sqe, lba), GIO_FIELD(Sqe, cdw12),
    GIO_TYPE(SglDescriptor), GIO_FIELD(SglDescriptor, address), GIO_FIELD(SglDescriptor, word),
    GIO_TYPE(Cqe), GIO_FIELD(Cqe, dw0), GIO_FIELD(Cqe, sq), GIO_FIELD(Cqe, last),
    GIO_TYPE(ControllerLimits), GIO_FIELD(ControllerLimits, blocks), GIO_FIELD(ControllerLimits, segment_size),
    GIO_FIELD(ControllerLimits, spin_ns), GIO_FIELD(ControllerLimits, idle_ns), GIO_FIELD(ControllerLimits, nsid),
    GIO_FIELD(ControllerLimits, mdts), GIO_FIELD(ControllerLimits, block_shift), GIO_FIELD(ControllerLimits, sgl),
    GIO_FIELD(ControllerLimits, workers),
    GIO_TYPE(ControllerFaults), GIO_FIELD(ControllerFaults, seed), GIO_FIELD(ControllerFaults, delay_ns), GIO_FIELD(ControllerFaults, fail),
    GIO_FIELD(ControllerFaults, status), GIO_FIELD(ControllerFaults, drop), GIO_FIELD(ControllerFaults, delay),
    GIO_FIELD(ControllerFaults, reads), GIO_FIELD(ControllerFaults, writes),
    GIO_TYPE(TwinOptions), GIO_FIELD(TwinOptions, poll_ns), GIO_FIELD(TwinOptions, workers), GIO_FIELD(TwinOptions, window),
    GIO_TYPE(RelayLine), GIO_FIELD(RelayLine, word), GIO_FIELD(RelayLine, doorbell),
    GIO_TYPE(FaultPlan), GIO_FIELD(FaultPlan, gate), GIO_FIELD(FaultPlan, rates), GIO_FIELD(FaultPlan, error),
    GIO_TYPE(ControllerCounts), GIO_FIELD(ControllerCounts, commands), GIO_FIELD(ControllerCounts, bytes),
    GIO_FIELD(ControllerCounts, failed), GIO_FIELD(ControllerCounts, dropped), GIO_FIELD(ControllerCounts, delayed),
    GIO_FIELD(ControllerCounts, fatal),
};

}  // namespace

extern "C" {

// Field `index` of the table; null past its end.
const char* gio_field(u32 index, u64* offset, u64* size) {
    if (index >= sizeof kFields / sizeof kFields[0]) return nullptr;
    *offset = kFields[index].offset;
    *size = kFields[index].size;
    return kFields[index].name;
}

i32 gio_errno_of(u32 code) { return errno_of(code); }

Controller* gio_controller_new(const ControllerLimits* limits) { return new Controller(*limits); }
void gio_controller_delete(Controller* it) { delete it; }
void gio_controller_add_queue(Controller* it, const QueuePair* queue) { it->add_queue(*queue); }
void gio_controller_map(Controller* it, const MappedRegion* region) { it->map(*region); }
i32 gio_controller_attach(Controller* it, u64 segment, i32 fd) { return it->attach(segment, fd); }
i32 gio_controller_detach(Controller* it, u64 segment, u64 timeout_ns) { return it->detach(segment, timeout_ns); }
void gio_controller_set_faults(Controller* it, const ControllerFaults* faults) { it->set_faults(*faults); }
void gio_controller_set_bad_blocks(Controller* it, const FaultPlan* plan, u32 drive) { it->set_bad_blocks(*plan, drive); }
void gio_controller_start(Controller* it) { it->start(); }
void gio_controller_wake(Controller* it) { it->commands.ring(); }
i32 gio_controller_stop(Controller* it, u64 timeout_ns) { return it->stop(timeout_ns); }
u32 gio_controller_release_dropped(Controller* it) { return it->release_dropped(); }
void gio_controller_counts(Controller* it, ControllerCounts* counts) { *counts = it->counts(); }

Endpoint* gio_controller_endpoint(Controller* it) { return it; }

Relay* gio_relay_new(const RelayLine* lines, u32 count, u64 spin_ns, u64 idle_ns) { return new Relay({lines, lines + count}, spin_ns, idle_ns); }
void gio_relay_delete(Relay* it) { delete it; }
void gio_relay_wake(Relay* it) { it->commands.ring(); }
u64 gio_relay_rings(Relay* it) { return it->rings(); }
Endpoint* gio_relay_endpoint(Relay* it) { return it; }

Bell* gio_bell_new() { return new Bell; }
void gio_bell_delete(Bell* it) { delete it; }
void gio_bell_ring(Bell* it) { it->ring(); }
u64 gio_bell_count(Bell* it) { return it->count(); }
u64 gio_bell_wait(Bell* it, u64 seen, u64 timeout_ns) { return it->wait(seen, timeout_ns); }

Twin* gio_twin_new(const Context* context, const TwinOptions* options, Endpoint* const* endpoints, u32 count, Bell* done) {
    return new Twin(*context, *options, {endpoints, endpoints + count}, *done);
}
void gio_twin_delete(Twin* it) { delete it; }
void gio_twin_issue(Twin* it, u32 ring, u32 klass, u64 deadline_ns) { it->issue(ring, klass, deadline_ns); }
void gio_twin_cancel(Twin* it, u32 ring) { it->cancel(ring); }
void gio_twin_refuse(Twin* it, u64 offset, u64 size) { it->refuse(offset, size); }
i32 gio_twin_stop(Twin* it, u64 timeout_ns) { return it->stop(timeout_ns); }

// What the kernels gio_uring and gio_abort do, on the calling thread; for tests and for resets.
void gio_run_sub_io(const Context* context, u32 ring, u32 piece, u32 lane) { run_sub_io(*context, ring, piece, lane); }
u32 gio_reap(const Context* context, const QueuePair* queue) { return reap(*context, *queue); }
void gio_abort_all(const Context* context, const QueuePair* queue) { abort_all(*context, *queue, kAbortedBySqDeletion); }

// Single steps of the protocol, for tests of one property at a time.
i32 gio_claim(const QueuePair* queue, u32 hint) { return claim_command(*queue, hint); }
void gio_free(const QueuePair* queue, u32 cid) { free_command(*queue, cid); }
void gio_submit(const QueuePair* queue, const Sqe* sqe) { submit(*queue, *sqe); }
void gio_announce(const QueuePair* queue) { announce(*queue); }

// The completion of an IOCB, read as the host must: the serial first, by acquire.
u64 gio_completed(const Completion* completion) { return SystemRef<u64>(const_cast<u64&>(completion->serial)).load(acquire); }
}
