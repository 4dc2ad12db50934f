// A queue pair used by thousands of threads at once: command slots, ticketed submission, one doorbell for many, and a completion queue that
// whoever waits sweeps for everybody.
//
// The one invariant: a command holds a command identifier from before its ticket until its CQE was taken, and there are entries - 1 of them.
// So an SQ of that size can't overflow and no CQE is ever overwritten. An SQ entry that comes round again was fetched: of the last `entries`
// tickets at least one is complete, and a controller fetches in order. (NVMe counts a queue full at entries - 1.)
#pragma once

#include "nvme.cuh"

namespace tutti::gio {

GIO_FUNCTION QueueState& state_of(const QueuePair& queue) { return *reinterpret_cast<QueueState*>(queue.state); }

// A free command identifier, or -1. `hint` spreads the threads over the words of the bitmap.
GIO_FUNCTION i32 claim_command(const QueuePair& queue, u32 hint) {
    QueueState& state = state_of(queue);
    u32 usable = (1u << queue.log_entries) - 1;
    u32 words = (usable + 31) / 32;
    for (u32 i = 0; i < words; ++i) {
        u32 word = (hint + i) % words;
        u32 exists = usable - 32 * word >= 32 ? ~0u : (1u << (usable - 32 * word)) - 1;
        LocalRef<u32> bits(state.in_use[word]);
        u32 taken = bits.load(relaxed);
        while (u32 free = ~taken & exists) {
            u32 bit = free & (0u - free);
            // Acquire: what the last holder of this identifier did is over. Pairs with the release in free_command.
            taken = bits.fetch_or(bit, acquire);
            if (!(taken & bit)) return static_cast<i32>(32 * word + lowest_bit(bit));
        }
    }
    return -1;
}

GIO_FUNCTION void free_command(const QueuePair& queue, u32 cid) {
    LocalRef<u32>(state_of(queue).in_use[cid / 32]).fetch_and(~(1u << cid % 32), release);
}

// Announces every SQE that lies ready in ticket order. Never waits: if another thread is at it, that thread looks again after it let go.
GIO_FUNCTION void announce(const QueuePair& queue) {
    QueueState& state = state_of(queue);
    u32 mask = (1u << queue.log_entries) - 1;
    LocalRef<u32> lock(state.sq_lock);
    for (;;) {
        // seq_cst four times (the mark in submit, this exchange, the unlock, the last load), and no weaker: with a total order over them, either
        // this exchange comes after the holder's unlock and takes the lock, or the holder's last load comes after our mark and sees it.
        // Otherwise an SQE could lie ready with nobody left to announce it.
        if (lock.exchange(1, seq_cst)) return;
        u32 tail = state.tail;
        // Acquire: the SQE behind the mark, which another thread wrote, is to be visible to the controller too. Pairs with the mark in submit.
        while (LocalRef<u32>(state.ready[tail & mask]).load(acquire) == tail + 1) ++tail;
        if (tail != state.tail) {
            state.tail = tail;
            ++state.doorbells;
            ring_doorbell(queue.sq_doorbell, tail & mask);
        }
        lock.store(0, seq_cst);
        if (LocalRef<u32>(state.ready[tail & mask]).load(seq_cst) != tail + 1) return;
    }
}

// Puts `sqe` into the SQ and sees to it that the controller hears of it. `sqe.cid` must be claimed: with that, nothing here waits.
GIO_FUNCTION void submit(const QueuePair& queue, const Sqe& sqe) {
    QueueState& state = state_of(queue);
    u32 mask = (1u << queue.log_entries) - 1;
    // Acquire and release: of the tickets since this entry was used last, one had its identifier freed and claimed again before a ticket that
    // precedes ours (or by us). Through this chain the controller's fetch of the old SQE happens before the store below.
    u32 ticket = LocalRef<u32>(state.next).fetch_add(1, acq_rel);
    reinterpret_cast<Sqe*>(queue.sq)[ticket & mask] = sqe;
    LocalRef<u32>(state.ready[ticket & mask]).store(ticket + 1, seq_cst);
    announce(queue);
}

// Takes every CQE that has arrived and passes it on; `Finish(iocb, context, joined, status)` finishes what nobody waits for any more.
// Returns how many were taken; 0 also when another thread is at it.
template <class Finish> GIO_FUNCTION u32 sweep(const QueuePair& queue, Finish&& finish) {
    QueueState& state = state_of(queue);
    LocalRef<u32> lock(state.cq_lock);
    // Look before the exchange: waiting threads then share the line instead of taking it from each other.
    // Acquire: head and stray as the last holder left them. Pairs with the unlock below.
    if (lock.load(relaxed) || lock.exchange(1, acquire)) return 0;
    u32 entries = 1u << queue.log_entries;
    u32 start = state.head;
    u32 head = start;
    for (; head - start < entries; ++head) {
        Cqe& cqe = reinterpret_cast<Cqe*>(queue.cq)[head & (entries - 1)];
        // Acquire at system scope: the data that the controller moved before it posted this entry is visible to whoever learns of it from us.
        u32 last = SystemRef<u32>(cqe.last).load(acquire);
        u32 phase = ~(head >> queue.log_entries) & 1;  // 1 in the first round, since the queue starts as zeros
        if ((last >> 16 & 1) != phase) break;
        u32 cid = last & 0xffff;
        u32 status = last >> 17;
        u32 seen = kIdle;
        if (cid < entries - 1) {
            LocalRef<u32> word(state.commands[cid].word);
            seen = kPending;
            // Release: the CQE and the data before it, for the owner. Acquire: the command's IOCB and context, when the owner has left.
            if (word.compare_exchange_strong(seen, kDone | status, acq_rel, acquire)) continue;
            if (seen == kLate) {
                Command command = state.commands[cid];
                word.store(kIdle, relaxed);
                LocalRef<u32>(state.late).fetch_sub(1, relaxed);
                // The pieces first, the identifier after: while a command is counted nowhere, its IOCB cannot be complete.
                finish(command.iocb, command.context, command.joined, status);
                free_command(queue, cid);
            }
        }
        if (seen != kLate) ++state.stray;  // never asked for, or answered twice
    }
    if (head != start) {
        state.head = head;
        ring_doorbell(queue.cq_doorbell, head & (entries - 1));
    }
    lock.store(0, release);
    return head - start;
}

}  // namespace tutti::gio
