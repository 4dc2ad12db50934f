// The engine that Python holds: drives by ordinal, batches in, results out.

#include <algorithm>
#include <cerrno>

#include "engine.hpp"
#include "ring.hpp"

using namespace tutti;

namespace {

/// A point in time `timeout` from now, at most 100 years ahead.
std::int64_t after(std::int64_t timeout) {
    constexpr std::int64_t century = 3'155'760'000'000'000'000;
    return now_ns() + std::min(std::max<std::int64_t>(timeout, 0), century);
}

}  // namespace

bool tutti::wait_for(tutti_engine *engine, Batch &batch, std::int64_t timeout) {
    const std::int64_t until = after(timeout);
    // A queue looks at a deadline when it starts something; on a drive that does not answer it starts nothing, so the waiter looks too.
    if (!batch.wait(std::min(until, batch.deadline_ns)) && now_ns() >= batch.deadline_ns) {
        engine->drop(batch, -ETIMEDOUT);
        batch.wait(until);
    }
    return batch.done();
}

int tutti_uring_probe() noexcept {
    int error = 0;
    Ring::open(2, error);
    return error;
}

tutti_engine *tutti_engine_open(const tutti_options *options) noexcept { return new tutti_engine(*options); }

int tutti_engine_refused(tutti_engine *engine) noexcept {
    std::lock_guard lock(engine->mutex);
    return engine->refused;
}

std::uint64_t tutti_engine_registered(tutti_engine *engine) noexcept {
    std::uint64_t most = 0;
    for (const auto &[_, drive] : engine->all()) most = std::max(most, drive->registered());
    return most;
}

int tutti_engine_attach(tutti_engine *engine, std::uint16_t drive, std::uint32_t segment, int fd) noexcept {
    std::lock_guard lock(engine->mutex);
    if (engine->closed) return -ESHUTDOWN;
    const auto opened = engine->open(drive);
    if (!opened) return -EAGAIN;
    return opened->queue.attach(segment, fd) ? 0 : -EEXIST;
}

int tutti_engine_detach(tutti_engine *engine, std::uint16_t drive, std::uint32_t segment, std::int64_t timeout) noexcept {
    const auto found = engine->find(drive);
    if (!found) return 1;
    const bool gone = found->queue.detach(segment, after(timeout));
    found->wake();
    return gone;
}

tutti_ticket *tutti_engine_submit(tutti_engine *engine, const tutti_ioctx *contexts, std::size_t n, unsigned klass,
                                  std::int64_t deadline) noexcept {
    return submit(engine, std::span(contexts, n), klass, deadline, engine->options.max_io);
}

tutti_ticket *tutti::submit(tutti_engine *engine, std::span<const tutti_ioctx> contexts, unsigned klass, std::int64_t deadline,
                            std::uint32_t max_io) {
    auto batch = std::make_shared<Batch>(contexts, klass, deadline, max_io);
    std::lock_guard lock(engine->mutex);  // against close: what is queued before it is drained by it
    if (engine->closed) return nullptr;
    for (const auto &part : batch->parts) {
        if (const auto found = engine->drives.find(part.drive); found != engine->drives.end()) {
            found->second->queue.push(batch, part.begin, part.end);
            found->second->wake();
        } else {
            for (std::uint32_t at = part.begin; at < part.end; ++at) batch->settle(at, batch->items[at].pieces, -EBADF);
        }
    }
    return new tutti_ticket{std::move(batch)};
}

int tutti_engine_wait(tutti_engine *engine, tutti_ticket *ticket, std::int64_t timeout, std::int32_t *out) noexcept {
    wait_for(engine, *ticket->batch, timeout);
    return ticket->batch->results(out);
}

int tutti_engine_poll(tutti_engine *engine, tutti_ticket *ticket, std::int32_t *out) noexcept {
    return tutti_engine_wait(engine, ticket, 0, out);
}

int tutti_ticket_done(tutti_ticket *ticket) noexcept { return ticket->batch->done(); }

void tutti_engine_cancel(tutti_engine *engine, tutti_ticket *ticket) noexcept { engine->drop(*ticket->batch, -ECANCELED); }

void tutti_ticket_release(tutti_ticket *ticket) noexcept { delete ticket; }

int tutti_engine_close(tutti_engine *engine, std::int64_t timeout) noexcept {
    const std::int64_t until = after(timeout);
    std::lock_guard one_at_a_time(engine->closing);
    {
        std::lock_guard lock(engine->mutex);
        engine->closed = true;
    }
    bool idle = true;
    const auto drives = engine->all();
    for (const auto &[_, drive] : drives) drive->queue.wait_idle(until);
    for (const auto &[_, drive] : drives) {
        drive->queue.drop(nullptr, -ECANCELED);
        const bool drained = drive->queue.wait_idle(now_ns());
        drive->stop(drained);
        idle = idle && drained;
    }
    return idle;
}

void tutti_engine_free(tutti_engine *engine) noexcept { delete engine; }

void tutti_engine_counters(tutti_engine *engine, tutti_counters *out) noexcept {
    *out = {};
    for (const auto &[_, drive] : engine->all()) {
        const Counters one = drive->queue.counters();
        out->contexts += one.contexts;
        out->transfers += one.transfers;
        out->bytes += one.bytes;
        out->resumed += one.resumed;
        out->retried += one.retried;
    }
}
