// One sub-I/O from IOCTX to result: a piece of at most MDTS bytes, or several IOCTX that are neighbours on the drive, moved by one NVMe command.
// On a GPU each thread is one; on the CPU a thread steps many.
#pragma once

#include "queue.cuh"

namespace tutti::gio {

GIO_FUNCTION Iocb& iocb_of(const Context& c, u32 iocb) { return reinterpret_cast<Iocb*>(c.iocbs)[iocb]; }

// How many sub-I/Os an IOCTX has; the host counts alike when it writes the map (tutti_sglang/gio/rings.py).
GIO_FUNCTION u32 pieces_of(const Context& c, const Ioctx& io) {
    if (io.drive >= c.drive_count || io.operation == kFlush || io.length == 0) return 1;
    return (io.length - 1) / reinterpret_cast<const Drive*>(c.drives)[io.drive].mdts + 1;
}

// Accounts for one piece of an IOCTX; the last piece writes the result, the last IOCTX completes the IOCB. `code` 0 = success.
GIO_FUNCTION void finish_piece(const Context& c, u32 ring, u32 index, u32 pieces, u32 code) {
    Iocb& iocb = iocb_of(c, ring);
    IocbWork& work = reinterpret_cast<IocbWork*>(c.works)[ring];
    LocalRef<u32> done(work.done[index]);
    if (code) {
        u32 seen = done.load(relaxed);
        while (!(seen >> 16) && !done.compare_exchange_weak(seen, seen | code << 16, relaxed, relaxed)) {}
    }
    // Acquire and release, here and below: the last one inherits what all others did, so that the completion stands for every byte moved.
    u32 before = done.fetch_add(1, acq_rel);
    if ((before & 0xffff) + 1 < pieces) return;
    code = before >> 16;
    done.store(0, relaxed);
    // Read before we count as finished: after that another thread may complete the IOCB, and the host write its next use into it.
    u32 count = iocb.count;
    Ioctx& context = iocb.contexts[index];
    iocb.status[index] = static_cast<u16>(code);
    i32 result = code ? -errno_of(code) : static_cast<i32>(context.length);
    // Release at system scope: the host may read a result before its IOCB is complete, when a neighbour's command is lost.
    SystemRef<i32>(context.result).store(result, release);
    if (code) LocalRef<u32>(work.errors).fetch_add(1, relaxed);
    LocalRef<u32> finished(work.finished);
    if (finished.fetch_add(1, acq_rel) + 1 < count) return;
    Completion& completion = reinterpret_cast<Completion*>(c.completions)[ring];
    completion.errors = LocalRef<u32>(work.errors).exchange(0, relaxed);
    finished.store(0, relaxed);
    // Release at system scope: the host that sees the serial sees all results and all data, and may use the IOCB again.
    SystemRef<u64>(completion.serial).store(iocb.serial, release);
}

// Finishes what no sub-I/O waits for: it gave up, or never began.
class FinishLate {
public:
    GIO_FUNCTION explicit FinishLate(const Context& c) : context_(c) {}
    GIO_FUNCTION void operator()(u32 ring, u32 index, u32 joined, u32 status) const {
        for (u32 i = index; i < index + joined; ++i)
            finish_piece(context_, ring, i, pieces_of(context_, iocb_of(context_, ring).contexts[i]), status);
    }

private:
    const Context& context_;
};

// `preparing`: it is to find out what it moves. Those before `finished` go on by themselves.
enum class Step : u32 { preparing, claiming, polling, finished, late };

class SubIo {
public:
    // Sub-I/O `piece` of IOCB `ring`. `lane` spreads sub-I/Os over queue pairs; `start` is when the IOCB was issued.
    GIO_FUNCTION void begin(const Context& c, u32 ring, u32 piece, u32 lane, u64 start) {
        u32 map = iocb_of(c, ring).map[piece];
        ring_ = ring;
        index_ = map & (kIocbContexts - 1);
        piece_ = map >> kContextBits & ((1u << (kJoinShift - kContextBits)) - 1);
        joined_ = (map >> kJoinShift) + 1;
        rest_ = 0;
        lane_ = lane;
        start_ = start;
        state_ = Step::preparing;
    }

    GIO_FUNCTION Step state() const { return state_; }

    // One step ahead; never waits. A sub-I/O that is `finished` or `late` needs no more steps.
    GIO_FUNCTION Step step(const Context& c) {
        u32 code = kGoesOn;
        if (state_ == Step::preparing) code = prepare(c);
        else if (state_ == Step::claiming) code = claim(c);
        else if (state_ == Step::polling) code = poll(c);
        if (code != kGoesOn) finish(c, code);  // once here, and not where it ends: it is large
        return state_;
    }

    // Ends it with `code` if it has no command yet.
    GIO_FUNCTION void abandon(const Context& c, u32 code) {
        while (state_ < Step::polling) finish(c, code);
    }

private:
    static constexpr u32 kGoesOn = ~0u;

    GIO_FUNCTION const Drive& drive(const Context& c) const { return reinterpret_cast<const Drive*>(c.drives)[drive_]; }
    GIO_FUNCTION const QueuePair& queue(const Context& c) const {
        const Drive& d = drive(c);
        return reinterpret_cast<const QueuePair*>(d.queues)[lane_ % d.queue_count];
    }

    // Finds the blocks and the bytes of what comes next: one run of blocks, and a descriptor for each run of memory, where there are several. A
    // code of ours if it must not reach the drive.
    GIO_FUNCTION u32 prepare(const Context& c) {
        auto* list = reinterpret_cast<SglDescriptor*>(c.lists) + static_cast<u64>(ring_) * kIocbContexts + index_;
        u64 lba = 0, bus = 0, run = 0;  // where the blocks, the memory and the last run of memory begin
        u32 length = 0, run_length = 0, region = 0, its_drive = 0, its_operation = 0;
        runs_ = 0;
        for (u32 i = 0; i < joined_; ++i) {
            if (u32 code = find(c, index_ + i)) return code;
            if (i == 0) {
                lba = lba_;
                bus = bus_;
                its_drive = drive_;
                its_operation = operation_;
            } else if (drive_ != its_drive || operation_ != its_operation || lba_ != lba + (length >> drive(c).block_shift)) return kBadRequest;
            if (i == 0 || region_ != region || bus_ != run + run_length) {
                if (i && (!c.lists || !drive(c).sgl)) return kBadAddress;
                if (i) list[runs_ - 1] = {run, run_length};
                ++runs_;
                run = bus_;
                run_length = 0;
            }
            region = region_;
            run_length += length_;
            length += length_;
        }
        if (length > drive(c).mdts) return kBadRequest;
        if (runs_ > 1) list[runs_ - 1] = {run, run_length};
        lba_ = lba;
        bus_ = bus;
        length_ = length;
        state_ = Step::claiming;
        return kGoesOn;
    }

    // Checks a piece of an IOCTX and finds its blocks and its bytes.
    GIO_FUNCTION u32 find(const Context& c, u32 index) {
        const Ioctx& io = iocb_of(c, ring_).contexts[index];
        drive_ = io.drive;
        operation_ = io.operation;
        if (drive_ >= c.drive_count) return kBadRange;
        const Drive& d = drive(c);
        region_ = 0;
        if (operation_ == kFlush) {
            length_ = 0;
            return 0;
        }
        u64 block = 1ull << d.block_shift;
        if (operation_ > kFlush || io.length == 0 || (io.offset | io.length) & (block - 1)) return kBadRequest;
        u64 from = static_cast<u64>(piece_) * d.mdts;
        length_ = io.length - from < d.mdts ? static_cast<u32>(io.length - from) : d.mdts;
        u64 first = (io.offset + from) >> d.block_shift;
        if (first >= d.blocks || (length_ >> d.block_shift) > d.blocks - first) return kBadRange;
        lba_ = d.first_block + first;
        u64 address = io.address + from;
        auto* regions = reinterpret_cast<const MappedRegion*>(c.regions);
        for (; region_ < c.region_count; ++region_) {
            u64 place = address - regions[region_].address;
            if (place < regions[region_].size && length_ <= regions[region_].size - place) {
                bus_ = regions[region_].bus + place;
                return 0;
            }
        }
        return kBadAddress;
    }

    GIO_FUNCTION u32 claim(const Context& c) {
        const Iocb& iocb = iocb_of(c, ring_);
        // Relaxed: a request to stop, nothing is read because of it.
        if (SystemRef<u32>(const_cast<u32&>(iocb.cancel)).load(relaxed)) return kCancelled;
        const QueuePair& q = queue(c);
        i32 cid = claim_command(q, lane_);
        if (cid < 0) {
            if (now_ns() - start_ > iocb.claim_ns) return kNoSlot;
            sweep(q, FinishLate(c));
            ++lane_;  // the next queue pair may have room
            return kGoesOn;
        }
        Sqe sqe{};
        sqe.opcode = operation_ == kRead ? kNvmeRead : operation_ == kWrite ? kNvmeWrite : kNvmeFlush;
        sqe.cid = static_cast<u16>(cid);
        sqe.nsid = drive(c).nsid;
        if (runs_ > 1) set_list(sqe, c.lists_bus + (static_cast<u64>(ring_) * kIocbContexts + index_) * sizeof(SglDescriptor), runs_);
        else if (length_) {
            const MappedRegion& region = reinterpret_cast<const MappedRegion*>(c.regions)[region_];
            if (!set_data(sqe, region, bus_, length_, drive(c).sgl)) {
                free_command(q, static_cast<u32>(cid));
                return kBadAddress;
            }
        }
        if (length_) {
            sqe.lba = lba_;
            sqe.cdw12 = (length_ >> drive(c).block_shift) - 1;
        }
        Command& command = state_of(q).commands[cid];
        command.iocb = ring_;
        command.context = index_;
        command.joined = joined_;
        // Release: iocb and IOCTX, for the sweep that finds this command late.
        LocalRef<u32>(command.word).store(kPending, release);
        cid_ = static_cast<u32>(cid);
        submitted_ = now_ns();
        state_ = Step::polling;
        submit(q, sqe);
        return kGoesOn;
    }

    GIO_FUNCTION u32 poll(const Context& c) {
        const QueuePair& q = queue(c);
        LocalRef<u32> word(state_of(q).commands[cid_].word);
        // Acquire: the data and the CQE behind the status. Pairs with the exchange in sweep.
        u32 seen = word.load(acquire);
        if (!(seen & kDone) && sweep(q, FinishLate(c))) seen = word.load(acquire);
        if (!(seen & kDone)) {
            if (now_ns() - submitted_ <= iocb_of(c, ring_).poll_ns) return kGoesOn;
            // The command, its identifier and its memory stay the controller's. Whoever sweeps its CQE, in whichever IOCB, finishes the piece.
            LocalRef<u32>(state_of(q).late).fetch_add(1, relaxed);
            seen = kPending;
            if (word.compare_exchange_strong(seen, kLate, acq_rel, acquire)) {
                advance(Step::late);
                return kGoesOn;
            }
            LocalRef<u32>(state_of(q).late).fetch_sub(1, relaxed);  // it came at the last moment
        }
        word.store(kIdle, relaxed);
        free_command(q, cid_);
        return seen & ~static_cast<u32>(kDone);
    }

    // Ends what is under way with `code`, and goes on to what is left of it.
    GIO_FUNCTION void finish(const Context& c, u32 code) {
        // An error concerns one of the joined IOCTX, or some: one by one they find out which.
        if (joined_ > 1 && code && code != kCancelled && code != kNoSlot) {
            rest_ = joined_ - 1;
            joined_ = 1;
            state_ = Step::preparing;
            return;
        }
        FinishLate{c}(ring_, index_, joined_, code);
        advance(Step::finished);
    }

    // On to the next of the IOCTX that go one by one; `last` when there is none.
    GIO_FUNCTION void advance(Step last) {
        state_ = rest_ ? Step::preparing : last;
        if (!rest_) return;
        ++index_;
        --rest_;
    }

    u64 start_, submitted_, lba_, bus_;
    u32 ring_, index_, piece_, joined_, rest_, lane_, drive_, length_, region_, runs_, cid_;
    u8 operation_;
    Step state_;
};

// Steps one sub-I/O to its end: what a GPU thread does.
GIO_FUNCTION void run_sub_io(const Context& c, u32 ring, u32 piece, u32 lane) {
    SubIo io;
    io.begin(c, ring, piece, lane, now_ns());
    Backoff backoff;
    while (io.step(c) < Step::finished) backoff.pause();
}

// Takes what has arrived for commands that nobody waits for: one thread per queue pair. Returns how many are still out.
GIO_FUNCTION u32 reap(const Context& c, const QueuePair& q) {
    sweep(q, FinishLate(c));
    return LocalRef<u32>(state_of(q).late).load(relaxed);
}

// After the controller was reset: ends every command of the queue pair with `status`, and makes the pair as new. Nothing else may run on it.
GIO_FUNCTION void abort_all(const Context& c, const QueuePair& q, u32 status) {
    QueueState& state = state_of(q);
    u32 entries = 1u << q.log_entries;
    for (u32 cid = 0; cid < entries - 1; ++cid) {
        Command& command = state.commands[cid];
        if (command.word == kIdle) continue;
        command.word = kIdle;
        FinishLate{c}(command.iocb, command.context, command.joined, status);
    }
    for (u32 i = 0; i < entries; ++i) {
        state.ready[i] = 0;
        reinterpret_cast<Cqe*>(q.cq)[i].last = 0;
    }
    for (u32& word : state.in_use) word = 0;
    state.next = state.tail = state.head = state.late = 0;
}

}  // namespace tutti::gio
