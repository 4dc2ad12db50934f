// Whole objects in one call: planned, moved, copied and checksummed, and Python is not asked in between. Beside a busy Python thread each
// return to it would cost up to a switch interval, and its arithmetic holds the GIL.

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "abi.hpp"
#include "batch.hpp"
#include "blocks.hpp"
#include "engine.hpp"
#include "objects.hpp"
#include "rows.hpp"
#include "xxh3.hpp"

using namespace tutti;

namespace {

constexpr std::int64_t kLongWaitNs = 1'000'000'000;

/// Bytes of a transfer into memory of small pages: drives take 127 to 254 of these at once, and the kernel would cut a longer one.
constexpr std::uint32_t kStraightIo = 512 << 10;

class Reading {
  public:
    Reading(tutti_engine *engine, tutti_read &read)
        : engine_(engine), read_(read), planner_(read.objects, engine->options.segment_size), order_(planner_.order()),
          pieces_((order_.size() + read.step - 1) / read.step), sum_(read.sizes, tensors()), sums_(tensors()) {}

    /// Start the first pieces, one in each lane; those that an earlier call started stay as they are.
    void begin() {
        if (!read_.started) std::fill_n(read_.states, order_.size(), kNever);
        while (read_.started < std::min<std::size_t>(read_.lane_count, pieces_) && start(read_.started)) ++read_.started;
    }

    void run(tutti_read *ahead) {
        begin();
        for (std::size_t piece = 0; piece < read_.started; ++piece) {
            if (ahead && read_.started == pieces_) Reading(engine_, *std::exchange(ahead, nullptr)).begin();
            const bool done = land(piece);
            if (!read_.straight) copy(piece);
            // The next piece for this memory; started pieces without a break lie in different lanes.
            if (done && read_.started == piece + read_.lane_count && read_.started < pieces_ && start(read_.started)) ++read_.started;
        }
        finish_blocks();
    }

  private:
    std::size_t tensors() const { return read_.objects.tensor_count; }
    std::size_t lane(std::size_t piece) const { return piece % read_.lane_count; }
    std::span<const std::uint32_t> objects(std::size_t piece) const {
        return std::span(order_).subspan(piece * read_.step, std::min<std::size_t>(read_.step, order_.size() - piece * read_.step));
    }

    bool start(std::size_t piece) {
        if (now_ns() >= read_.deadline) return false;
        contexts_.clear();
        for (const auto object : objects(piece)) {
            const std::uint64_t *const rows = read_.straight ? read_.rows + object * tensors() : nullptr;
            planner_.add(contexts_, object, rows, 0, static_cast<std::uint8_t>(read_.klass));
        }
        if (!read_.straight)
            for (std::size_t number = 0; number < contexts_.size(); ++number) contexts_[number].address = number;
        sort_by_place(contexts_);
        if (!read_.straight) lay_out(piece);
        read_.open_contexts[lane(piece)] = static_cast<std::uint32_t>(contexts_.size());
        tutti_ticket *&ticket = read_.open[lane(piece)];
        const std::uint32_t most = engine_->options.max_io;
        ticket = submit(engine_, contexts_, read_.klass, read_.deadline, read_.straight ? std::min(most, kStraightIo) : most);
        return ticket != nullptr;
    }

    /// In staging as on the drives: neighbours there are neighbours here, and a transfer has one piece of memory instead of one per tensor.
    /// Until then `address` is the number of the context in the order of objects and tensors.
    void lay_out(std::size_t piece) {
        std::uint64_t place = 0, *const places = places_of(piece);
        for (auto &context : contexts_) {
            places[context.address] = place;
            context.address = read_.lanes[lane(piece)] + place;
            place += context.length;
        }
    }

    std::uint64_t *places_of(std::size_t piece) const { return read_.places + lane(piece) * read_.step * tensors(); }

    /// Wait until the deadline, give up what has not started. False when the drives still owe something: the ticket stays open.
    bool land(std::size_t piece) {
        tutti_ticket *&ticket = read_.open[lane(piece)];
        if (!wait_for(engine_, *ticket->batch, read_.deadline - now_ns())) {
            tutti_engine_cancel(engine_, ticket);
            while (read_.straight && !wait_for(engine_, *ticket->batch, kLongWaitNs)) {
            }
        }
        for (const auto object : objects(piece)) read_.states[object] = kWhole;
        const std::uint64_t before = read_.moved.failed_count;
        const bool done = ticket->batch->account(read_.moved);
        for (std::uint64_t at = before; at < read_.moved.failed_count; ++at) read_.states[read_.moved.failed[at].tag] = kFailed;
        if (done) {
            tutti_ticket_release(ticket);
            ticket = nullptr;
        }
        return done;
    }

    /// Copy the objects of a piece that came whole.
    void copy(std::size_t piece) {
        const std::uint64_t *places = places_of(piece);
        for (const auto object : objects(piece)) {
            if (read_.states[object] == kWhole) copy_object(object, read_.lanes[lane(piece)], places);
            places += tensors();
        }
    }

    void copy_object(std::uint32_t object, std::uint64_t base, const std::uint64_t *places) {
        for (std::size_t t = 0; t < tensors(); ++t) {
            unsigned char *dst = memory(read_.rows[object * tensors() + t]), *src = memory(base + places[t]);
            if (read_.roots)
                sums_[t] = sum_(dst, src, read_.sizes[t]);
            else
                copy_row(dst, src, read_.sizes[t]);
        }
        if (read_.roots && xxh3_64(sums_.data(), 8 * tensors()) != read_.roots[object]) read_.states[object] = kAltered;
    }

    tutti_engine *const engine_;
    tutti_read &read_;
    const Planner planner_;
    const std::vector<std::uint32_t> order_;
    const std::size_t pieces_;
    Summer sum_;
    std::vector<std::uint64_t> sums_;
    std::vector<tutti_ioctx> contexts_;
};

std::vector<tutti_ioctx> plan(const tutti_objects &objects, const std::uint64_t *rows, std::uint64_t segment_size, unsigned operation,
                              unsigned klass) {
    const Planner planner(objects, segment_size);
    std::vector<tutti_ioctx> contexts;
    contexts.reserve(objects.count * objects.tensor_count);
    for (std::uint32_t object = 0; object < objects.count; ++object)
        planner.add(contexts, object, rows + object * objects.tensor_count, static_cast<std::uint8_t>(operation),
                    static_cast<std::uint8_t>(klass));
    sort_by_place(contexts);
    return contexts;
}

}  // namespace

void tutti_engine_read(tutti_engine *engine, tutti_read *read, tutti_read *ahead) noexcept { Reading(engine, *read).run(ahead); }

tutti_ticket *tutti_engine_launch(tutti_engine *engine, const tutti_objects *objects, const std::uint64_t *rows, unsigned operation,
                                  unsigned klass, std::int64_t deadline) noexcept {
    const auto contexts = plan(*objects, rows, engine->options.segment_size, operation, klass);
    return tutti_engine_submit(engine, contexts.data(), contexts.size(), klass, deadline);
}

int tutti_engine_land(tutti_engine *engine, tutti_ticket *ticket, std::int64_t timeout, tutti_moved *moved) noexcept {
    wait_for(engine, *ticket->batch, timeout);
    return ticket->batch->account(*moved);
}

std::uint64_t tutti_plan(const tutti_objects *objects, const std::uint64_t *rows, std::uint64_t segment_size, unsigned operation,
                         unsigned klass, tutti_ioctx *out) noexcept {
    const auto contexts = plan(*objects, rows, segment_size, operation, klass);
    std::ranges::copy(contexts, out);
    return contexts.size();
}
