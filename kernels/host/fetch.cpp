// A whole read in one call: pieces of staging are filled by the drives, copied out and checksummed, and filled again, and Python is not
// asked in between. Beside a busy Python thread each return to it would cost up to a switch interval.

#include <algorithm>
#include <cerrno>
#include <vector>

#include "abi.hpp"
#include "batch.hpp"
#include "blocks.hpp"
#include "rows.hpp"

using namespace tutti;

namespace {

class Fetcher {
  public:
    Fetcher(tutti_engine *engine, const tutti_fetch &fetch) : engine_(engine), fetch_(fetch), sum_(fetch.sizes, fetch.tensors) {}

    void run() {
        std::fill_n(fetch_.results, fetch_.piece_contexts[fetch_.pieces], -ETIMEDOUT);
        std::size_t started = 0;
        while (started < std::min<std::size_t>(fetch_.lanes, fetch_.pieces) && start(started)) ++started;
        for (std::size_t piece = 0; piece < started; ++piece) {
            const bool done = finish(piece);
            copy(piece);
            // The next piece for this memory; started pieces without a break lie in different lanes.
            if (done && started == piece + fetch_.lanes && started < fetch_.pieces && start(started)) ++started;
        }
        finish_blocks();
    }

  private:
    tutti_ticket *&ticket(std::size_t piece) { return fetch_.open[piece % fetch_.lanes]; }
    std::uint32_t begin(std::size_t piece) const { return fetch_.piece_contexts[piece]; }

    bool start(std::size_t piece) {
        if (now_ns() >= fetch_.deadline) return false;
        const std::size_t count = begin(piece + 1) - begin(piece);
        ticket(piece) = tutti_engine_submit(engine_, fetch_.contexts + begin(piece), count, fetch_.klass, fetch_.deadline);
        return ticket(piece) != nullptr;
    }

    /// Wait until the deadline, give up what has not started. False when the drives still owe something: the ticket stays open.
    bool finish(std::size_t piece) {
        std::int32_t *results = fetch_.results + begin(piece);
        bool done = tutti_engine_wait(engine_, ticket(piece), fetch_.deadline - now_ns(), results);
        if (!done) {
            tutti_engine_cancel(engine_, ticket(piece));
            done = tutti_engine_poll(engine_, ticket(piece), results);
        }
        if (done) {
            tutti_ticket_release(ticket(piece));
            ticket(piece) = nullptr;
        }
        return done;
    }

    /// Copy the objects of a piece that came whole.
    void copy(std::size_t piece) {
        const std::size_t first = fetch_.piece_objects[piece], last = fetch_.piece_objects[piece + 1];
        std::fill(fetch_.copied + first, fetch_.copied + last, 1);
        for (std::size_t at = begin(piece); at < begin(piece + 1); ++at)
            if (fetch_.results[at] != static_cast<std::int32_t>(fetch_.contexts[at].length)) fetch_.copied[fetch_.owner[at]] = 0;
        for (std::size_t object = first; object < last; ++object) {
            if (!fetch_.copied[object]) continue;
            for (std::size_t tensor = 0; tensor < fetch_.tensors; ++tensor) {
                const std::size_t row = object * fetch_.tensors + tensor;
                unsigned char *dst = memory(fetch_.dst[row]), *src = memory(fetch_.src[row]);
                if (fetch_.sums)
                    fetch_.sums[row] = sum_(dst, src, fetch_.sizes[tensor]);
                else
                    copy_row(dst, src, fetch_.sizes[tensor]);
            }
        }
    }

    tutti_engine *const engine_;
    const tutti_fetch &fetch_;
    Summer sum_;
};

}  // namespace

void tutti_engine_fetch(tutti_engine *engine, const tutti_fetch *fetch) noexcept { Fetcher(engine, *fetch).run(); }
