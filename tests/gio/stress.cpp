// Threads against the software controller through the protocol's own code, as the kernel's threads do it: every byte, result and word is checked.
// Built and run by test_stress.py, plain and with ThreadSanitizer. Exit status 0 = everything held; the last line is a summary in JSON.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "controller.hpp"
#include "twin.hpp"

using namespace tutti::gio;

namespace {

constexpr u32 kSlots = 1024, kSlotBytes = 4096, kBlock = 512, kDepth = 4;
constexpr u64 kBusOffset = 0x7700000000ull;  // a controller that used host addresses would be refused

std::map<std::string, u64> options = {
    {"ios", 50000}, {"threads", 8}, {"log-entries", 4}, {"queues", 2}, {"mdts", 1024}, {"sgl", 1}, {"workers", 2}, {"seed", 1},
    {"fail", 0}, {"drop", 0}, {"delay", 0}, {"delay-ns", 100000}, {"poll-ns", 60000000000ull}, {"claim-ns", 60000000000ull}, {"wrap", 0},
    {"twin", 0}, {"cancel", 0}, {"join", 0}};

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                              \
        }                                                                              \
    } while (0)

template <class T> T* pages(size_t count) {
    void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return static_cast<T*>(memory);
}

struct Memory {
    char* data = pages<char>(2 * kSlots * kSlotBytes);  // what is written, then what is read
    u64* table = pages<u64>(4 * 2 * kSlots);
    Iocb* iocbs = pages<Iocb>(kDepth);
    IocbWork* works = pages<IocbWork>(kDepth);
    Completion* completions = pages<Completion>(kDepth);
    SglDescriptor* lists = pages<SglDescriptor>(kDepth * kIocbContexts);
    MappedRegion regions[3];
    Drive drive{};
    std::vector<QueuePair> queues;
    Context context{};

    Memory() {
        u64 data_pages = 2 * kSlots * kSlotBytes / kPage;
        u64 bus = reinterpret_cast<u64>(data) + kBusOffset, table_bus = reinterpret_cast<u64>(table) + kBusOffset;
        for (u64 page = 0; page < data_pages; page += kPrpWindow)
            for (u64 i = 0; i < 512 && page + i < data_pages; ++i) table[page / kPrpWindow * 512 + i] = bus + (page + i) * kPage;
        regions[0] = {reinterpret_cast<u64>(data), 2 * kSlots * kSlotBytes, bus, table_bus};
        regions[1] = {reinterpret_cast<u64>(table), 4 * 2 * kSlots * sizeof(u64), table_bus, 0};
        regions[2] = {reinterpret_cast<u64>(lists), kDepth * kIocbContexts * sizeof(SglDescriptor), reinterpret_cast<u64>(lists) + kBusOffset, 0};
        for (u32 i = 0; i < options["queues"]; ++i) {
            QueueState* state = pages<QueueState>(1);
            u32* doorbells = pages<u32>(1024);
            u32 log = static_cast<u32>(options["log-entries"]);
            // Near the end of u32, at the start of a round with phase 1, so that tickets and heads wrap in the test.
            if (options["wrap"]) state->next = state->tail = state->head = 0u - (4u << log);
            queues.push_back({reinterpret_cast<u64>(pages<Sqe>(1 << log)), reinterpret_cast<u64>(pages<Cqe>(1 << log)),
                              reinterpret_cast<u64>(doorbells), reinterpret_cast<u64>(doorbells + 32), reinterpret_cast<u64>(state), log, 0});
        }
        drive = {reinterpret_cast<u64>(queues.data()), 0, kSlots * kSlotBytes / kBlock, static_cast<u32>(queues.size()), 1,
                 static_cast<u32>(options["mdts"]), 9, static_cast<u8>(options["sgl"]), 0};
        context = {reinterpret_cast<u64>(iocbs), reinterpret_cast<u64>(works), reinterpret_cast<u64>(completions), reinterpret_cast<u64>(regions),
                   reinterpret_cast<u64>(&drive), regions[2].address, regions[2].bus, kDepth, 1, 1, 0};
    }
};

// What each slot must hold: its version, or unknown after a write that failed in part.
struct Model {
    std::vector<u32> version = std::vector<u32>(kSlots, 0);
    std::vector<char> known = std::vector<char>(kSlots, 0);
};

void fill(char* place, u32 slot, u32 version) {
    for (u32 i = 0; i < kSlotBytes / 8; ++i) {
        u64 word = (static_cast<u64>(slot) << 40) ^ (static_cast<u64>(version) << 16) ^ i;
        std::memcpy(place + 8 * i, &word, 8);
    }
}

// Sub-I/Os that wait for a thread, as blocks of a grid wait for an SM.
class Work {
public:
    struct Item {
        u32 ring, piece;
    };
    void put(u32 ring, u32 pieces) {
        std::lock_guard lock(mutex_);
        for (u32 piece = 0; piece < pieces; ++piece) items_.push_back({ring, piece});
        changed_.notify_all();
    }
    bool take(Item& item) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return over_ || !items_.empty(); });
        if (items_.empty()) return false;
        item = items_.front();
        items_.pop_front();
        return true;
    }
    void end() {
        std::lock_guard lock(mutex_);
        over_ = true;
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Item> items_;
    bool over_ = false;
};

// The slots of IOCB `ring` in random order; those that are to be joined side by side on the drive, in runs.
std::vector<u32> slots_of(u32 ring, std::mt19937_64& random) {
    std::vector<u32> slots;
    if (options["join"]) {
        for (u32 slot = ring * (kSlots / kDepth); slot < (ring + 1) * (kSlots / kDepth); ++slot)
            if (random() % 8) slots.push_back(slot);
        return slots;
    }
    for (u32 slot = ring; slot < kSlots; slot += kDepth) slots.push_back(slot);
    std::shuffle(slots.begin(), slots.end(), random);
    return slots;
}

// The map of an IOCB: a word for each piece, or for neighbours on the drive together.
u32 map_pieces(const Context& c, Iocb& iocb) {
    u32 piece = 0;
    for (u32 i = 0; i < iocb.count;) {
        u32 joined = 1;
        auto follows = [&](u32 at) { return iocb.contexts[at].offset == iocb.contexts[at - 1].offset + iocb.contexts[at - 1].length; };
        while (joined < options["join"] && i + joined < iocb.count && follows(i + joined)) ++joined;
        for (u32 p = 0; p < (joined > 1 ? 1 : pieces_of(c, iocb.contexts[i])); ++p)
            iocb.map[piece++] = (joined - 1) << kJoinShift | p << kContextBits | i;
        i += joined;
    }
    return piece;
}

// IOCB `ring`: writes or reads some of its slots; writes whole, reads whole blocks from a random one on.
void prepare(Memory& m, u32 ring, bool write, u32 version, std::mt19937_64& random, u64 serial) {
    std::vector<u32> slots = slots_of(ring, random);
    u32 count = 1 + static_cast<u32>(random() % slots.size());
    Iocb& iocb = m.iocbs[ring];
    iocb.serial = serial;
    iocb.claim_ns = options["claim-ns"];
    iocb.poll_ns = options["poll-ns"];
    iocb.count = count;
    iocb.cancel = 0;
    for (u32 i = 0; i < count; ++i) {
        bool whole = write || options["join"];
        u32 first = whole ? 0 : static_cast<u32>(random() % 8);
        u32 blocks = whole ? 8 : 1 + static_cast<u32>(random() % (8 - first));
        u64 place = static_cast<u64>(slots[i]) * kSlotBytes + first * kBlock;
        u64 scattered = options["join"] ? place ^ kSlotBytes : place;  // neighbours on the drive are none in memory
        char* memory = m.data + (write ? 0 : kSlots * kSlotBytes) + scattered;
        if (write) fill(memory, slots[i], version);
        else std::memset(memory, 0xee, blocks * kBlock);
        iocb.contexts[i] = {reinterpret_cast<u64>(memory), place, blocks * kBlock, -115, 0, static_cast<u8>(write ? kWrite : kRead), 0, slots[i]};
    }
    iocb.pieces = map_pieces(m.context, iocb);
}

u64 check(Memory& m, Model& model, u32 ring, u64& errors) {
    Iocb& iocb = m.iocbs[ring];
    u64 failed = 0;
    for (u32 i = 0; i < iocb.count; ++i) {
        const Ioctx& io = iocb.contexts[i];
        bool good = io.result == static_cast<i32>(io.length);
        CHECK(good || io.result == -5 || (options["cancel"] && io.result == -125));
        CHECK(good == (iocb.status[i] == 0));
        failed += !good;
        if (io.operation == kWrite) {
            model.known[io.tag] = good;
            model.version[io.tag] = static_cast<u32>(iocb.serial);
        } else if (good && model.known[io.tag]) {
            char expected[kSlotBytes];
            fill(expected, io.tag, model.version[io.tag]);
            CHECK(!std::memcmp(reinterpret_cast<char*>(io.address), expected + io.offset % kSlotBytes, io.length));
        }
    }
    CHECK(m.completions[ring].errors == failed);
    errors += failed;
    return iocb.pieces;
}

// The kernel's way: a thread per sub-I/O, of which `threads` are resident.
class ThreadPerSubIo {
public:
    explicit ThreadPerSubIo(const Context& context) {
        for (u32 t = 0; t < options["threads"]; ++t)
            threads_.emplace_back([&, t] {
                Work::Item item;
                for (u32 warp = t; work_.take(item); ++warp) run_sub_io(context, item.ring, item.piece, warp / 8);
            });
    }
    ~ThreadPerSubIo() {
        work_.end();
        for (std::thread& thread : threads_) thread.join();
    }
    void issue(u32 ring, u32 pieces) { work_.put(ring, pieces); }

private:
    Work work_;
    std::vector<std::thread> threads_;
};

struct Totals {
    u64 ios = 0, errors = 0, late = 0, released = 0;
};

// Issues IOCBs until enough I/Os are done. Each IOCB has its own slots and is used again as soon as its completion is seen, while threads still
// leave the last use of it.
template <class Issue> Totals drive(Memory& m, Controller& controller, Issue&& issue) {
    std::mt19937_64 random(options["seed"]);
    Model model;
    Totals totals;
    u64 issued = 0, serial = 0, busy = 0, looked = now_ns();
    auto start = [&](u32 ring) {
        ++serial;
        prepare(m, ring, random() % 2, static_cast<u32>(serial), random, serial);
        u32 pieces = m.iocbs[ring].pieces;
        issued += pieces;
        busy |= 1u << ring;
        issue(ring, pieces, random);
    };
    for (u32 ring = 0; ring < kDepth; ++ring) start(ring);
    while (busy) {
        bool seen = false;
        for (u32 ring = 0; ring < kDepth; ++ring) {
            if (!(busy >> ring & 1) || SystemRef<u64>(m.completions[ring].serial).load(acquire) != m.iocbs[ring].serial) continue;
            seen = true;
            busy &= ~(1u << ring);
            totals.ios += check(m, model, ring, totals.errors);
            if (issued < options["ios"]) start(ring);
        }
        if (!seen && now_ns() - looked > 5000000) {  // what was lost comes back late, and counts
            looked = now_ns();
            for (const QueuePair& queue : m.queues) totals.late = std::max<u64>(totals.late, LocalRef<u32>(state_of(queue).late).load(relaxed));
            totals.released += controller.release_dropped();
            for (const QueuePair& queue : m.queues) reap(m.context, queue);
        }
        if (!seen) sched_yield();
    }
    return totals;
}

Totals run(Memory& m, Controller& controller) {
    if (!options["twin"]) {
        ThreadPerSubIo threads(m.context);
        return drive(m, controller, [&](u32 ring, u32 pieces, std::mt19937_64&) { threads.issue(ring, pieces); });
    }
    Bell done;
    Twin twin(m.context, {5000000, static_cast<u32>(options["threads"]), 16}, {&controller}, done);
    Totals totals = drive(m, controller, [&](u32 ring, u32, std::mt19937_64& random) {
        twin.issue(ring, static_cast<u32>(random() % 3), ~0ull);
        if (random() % 1000000 < options["cancel"]) twin.cancel(ring);
    });
    CHECK(done.count() > 0);
    CHECK(controller.stop(10000000000ull) && twin.stop(10000000000ull));
    return totals;
}

// Nothing may be left anywhere.
u64 check_state(Memory& m) {
    u64 doorbells = 0;
    for (const QueuePair& queue : m.queues) {
        QueueState& state = state_of(queue);
        for (u32 word : state.in_use) CHECK(word == 0);
        for (const Command& command : state.commands) CHECK(command.word == kIdle);
        CHECK(state.stray == 0 && state.late == 0 && state.next == state.tail && state.next == state.head);
        if (options["wrap"]) CHECK(state.next < (1u << 31));
        doorbells += state.doorbells;
    }
    for (size_t i = 0; i < kDepth * sizeof(IocbWork); ++i) CHECK(reinterpret_cast<char*>(m.works)[i] == 0);
    return doorbells;
}

}  // namespace

int main(int argc, char** argv) {
    CHECK(argc % 2 == 0);
    for (int i = 2; i < argc; i += 2) {
        CHECK(options.contains(argv[i] + 2));
        options[argv[i] + 2] = std::stoull(argv[i + 1]);
    }
    Memory m;
    Controller controller({kSlots * kSlotBytes / kBlock, kSlots * kSlotBytes / 4, 50000, 1000000, 1, m.drive.mdts, 9, m.drive.sgl,
                           static_cast<u32>(options["workers"]), 0});
    for (u64 segment = 0; segment < 4; ++segment) {
        std::string path = std::string(argv[1]) + "." + std::to_string(segment);
        int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
        CHECK(fd >= 0 && ftruncate(fd, kSlots * kSlotBytes / 4) == 0);
        controller.attach(segment, fd);
    }
    for (const MappedRegion& region : m.regions) controller.map(region);
    for (const QueuePair& queue : m.queues) controller.add_queue(queue);
    auto chance = [](const char* name) { return static_cast<u32>(options[name]); };
    controller.set_faults({options["seed"], options["delay-ns"], chance("fail"), kUnrecoveredRead, chance("drop"), chance("delay"), 1, 1});
    controller.start();
    Totals totals = run(m, controller);
    CHECK(controller.stop(10000000000ull));
    ControllerCounts counts = controller.counts();
    u64 doorbells = check_state(m);
    CHECK(counts.fatal == 0 && totals.released == counts.dropped);
    bool again = options["join"] && options["fail"];  // what failed together is asked for one by one
    CHECK(again || (counts.commands <= totals.ios && doorbells <= totals.ios));
    CHECK(options["cancel"] || (again ? counts.commands > totals.ios : counts.commands == totals.ios));
    CHECK(options["fail"] || options["cancel"] || (totals.errors == 0 && counts.failed == 0));
    std::printf("{\"ios\": %llu, \"errors\": %llu, \"late\": %llu, \"dropped\": %llu, \"delayed\": %llu, \"doorbells\": %llu}\n", totals.ios,
                totals.errors, totals.late, counts.dropped, counts.delayed, doorbells);
}
