// The engine under sanitizers: many threads, drives with faults, deadlines, cancel, detach and close while I/O is in flight.
// Arguments: a directory for scratch files, a seed.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../abi.hpp"
#include "../batch.hpp"
#include "check.hpp"

namespace {

constexpr std::uint64_t kSegment = 1 << 20;
constexpr std::uint32_t kMaxIo = 64 << 10, kSector = 512, kPage = 4096;
constexpr std::int64_t kMs = 1'000'000, kSecond = 1000 * kMs;
constexpr unsigned kDrives = 2, kSegments = 4;
constexpr std::uint32_t kStalled = 65536;
enum Fault { kError, kZero, kShort, kTorn, kLate, kStall };

std::string directory;
unsigned seed = 0;

void eventually(const std::function<bool()> &holds) {
    for (int ms = 0; !holds(); ++ms) {
        CHECK(ms < 10'000);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

/// An engine over scratch files, closed and freed at the end.
class Scratch {
  public:
    explicit Scratch(bool pool, const FaultPlan *faults = nullptr, std::uint32_t depth = 8) {
        staging.resize(1 << 20);
        const tutti_options options{kSegment, address(staging.data()), staging.size(), kMaxIo, depth, 4, pool, faults};
        engine = tutti_engine_open(&options);
        for (unsigned drive = 0; drive < kDrives; ++drive)
            for (unsigned segment = 0; segment < kSegments; ++segment) {
                const std::string path = directory + "/" + std::to_string(drive) + "-" + std::to_string(segment);
                const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
                CHECK(fd >= 0 && ftruncate(fd, kSegment) == 0);
                CHECK(tutti_engine_attach(engine, static_cast<std::uint16_t>(drive), segment, fd) == 0);
                files.push_back(fd);
            }
    }
    ~Scratch() {
        CHECK(tutti_engine_close(engine, 10 * kSecond) == 1);
        tutti_engine_free(engine);
        for (const int fd : files) close(fd);
    }

    static std::uint64_t address(const void *memory) { return reinterpret_cast<std::uint64_t>(memory); }

    tutti_ticket *submit(const std::vector<tutti_ioctx> &batch, unsigned klass = 0, std::int64_t deadline = 60 * kSecond) {
        return tutti_engine_submit(engine, batch.data(), batch.size(), klass, tutti::now_ns() + deadline);
    }
    std::vector<std::int32_t> wait(tutti_ticket *ticket, std::size_t n, std::int64_t timeout, bool done) {
        std::vector<std::int32_t> results(n);
        CHECK(tutti_engine_wait(engine, ticket, timeout, results.data()) == done);
        return results;
    }

    tutti_engine *engine;
    std::vector<char> staging;
    std::vector<int> files;
};

/// `count` pages of drive 0, segment 0.
std::vector<tutti_ioctx> pages(std::vector<char> &memory, std::uint32_t count, std::uint8_t operation) {
    memory.resize(count * kPage);
    std::vector<tutti_ioctx> batch;
    for (std::uint32_t i = 0; i < count; ++i)  // every other page: nothing coalesces
        batch.push_back({Scratch::address(memory.data() + i * kPage), 2ull * i * kPage, kPage, 0, 0, operation, 0, i});
    return batch;
}

/// Each thread writes and reads its own stripe of all files, and compares with what it wrote last.
void threads_read_what_they_wrote(bool pool) {
    const FaultPlan faults{seed, 0, ~0ull, nullptr, {0, 0, 3000, 0, 1000, 0}, 0xFFFF, 3, EIO, 200};
    Scratch scratch(pool, &faults);
    constexpr unsigned threads = 4;
    constexpr std::uint64_t stripe = kSegment / threads;
    std::vector<std::thread> running;
    for (unsigned me = 0; me < threads; ++me)
        running.emplace_back([&, me] {
            std::mt19937_64 random(seed * 100 + me);
            std::vector<char> model(kDrives * kSegments * stripe), memory(model.size());
            for (int round = 0; round < 8; ++round) {
                const bool write = round % 2 == 0;
                std::vector<tutti_ioctx> batch;
                for (unsigned file = 0; file < kDrives * kSegments; ++file)
                    for (std::uint64_t at = 0; at < stripe;) {
                        const std::uint64_t want = (1 + random() % (random() % 8 ? 16 : 300)) * kSector;
                        const auto length = static_cast<std::uint32_t>(std::min(want, stripe - at));
                        const std::uint64_t place = file * stripe + at;
                        batch.push_back({Scratch::address(memory.data() + place), file / kDrives * kSegment + me * stripe + at, length, 0,
                                         static_cast<std::uint16_t>(file % kDrives), write, 0, 0});
                        at += length;
                    }
                if (round % 3) std::shuffle(batch.begin(), batch.end(), random);
                for (auto &byte : memory) byte = static_cast<char>(write ? random() : 0);
                if (write) model = memory;
                tutti_ticket *ticket = scratch.submit(batch, static_cast<unsigned>(random() % 3));
                const auto results = scratch.wait(ticket, batch.size(), 60 * kSecond, true);
                for (std::size_t i = 0; i < batch.size(); ++i) CHECK(results[i] == static_cast<std::int32_t>(batch[i].length));
                CHECK(memory == model);
                tutti_ticket_release(ticket);
            }
        });
    for (auto &thread : running) thread.join();
}

/// Two threads write objects and read them through two lanes of memory each, whole and without their first tensor.
void whole_objects_through_little_staging(bool pool) {
    const FaultPlan faults{seed, 0, ~0ull, nullptr, {0, 0, 5000, 0, 500, 0}, 0xFFFF, 3, EIO, 200};
    Scratch scratch(pool, &faults);
    constexpr std::uint64_t count = 32, tensors = 2, step = 8, lanes = 2, tensor = 2 * kPage, size = tensors * tensor;
    // Geometry.packed: groups of 2 slots, cycle (0, 1), a period of 2 groups that puts a tensor of each on each drive.
    const std::vector<std::uint64_t> map{2, 2, tensors, 2 * size, 1, 0, 1, 0, 0, 0, 0, 2 * tensor, 2 * tensor, tensor, tensor};
    const std::uint64_t *maps[] = {map.data()};
    std::vector<std::thread> running;
    for (std::uint64_t me = 0; me < 2; ++me)
        running.emplace_back([&, me] {
            const std::uint64_t segment = me;
            std::vector<std::uint64_t> numbers, rows, part_rows, sizes(tensors, tensor), sums(count * tensors), roots(count);
            std::vector<std::uint32_t> places(count, 0), which{0, 1};
            std::vector<unsigned char> content(count * size), staging(lanes * step * size), target(content.size());
            std::mt19937_64 random(seed + me);
            for (auto &byte : content) byte = static_cast<unsigned char>(random());
            for (std::uint64_t object = 0; object < count; ++object) {
                numbers.push_back((object * 7 + 3) % count);
                for (std::uint64_t t = 0; t < tensors; ++t) rows.push_back(Scratch::address(target.data() + object * size + t * tensor));
                part_rows.push_back(Scratch::address(target.data() + object * size + tensor));
            }
            tutti_objects objects{numbers.data(), places.data(), &segment, maps, which.data(), count, tensors};
            std::vector<tutti_ioctx> failed(count * tensors);
            std::uint64_t counts[kDrives] = {}, bytes[kDrives] = {};
            tutti_moved moved{failed.data(), 0, counts, bytes};
            std::vector<std::uint64_t> sources;
            for (std::uint64_t i = 0; i < count * tensors; ++i) sources.push_back(Scratch::address(content.data() + i * tensor));
            tutti_ticket *ticket = tutti_engine_launch(scratch.engine, &objects, sources.data(), 1, 2, tutti::now_ns() + 60 * kSecond);
            CHECK(tutti_engine_land(scratch.engine, ticket, 60 * kSecond, &moved) == 1);
            CHECK(!moved.failed_count && counts[0] == count && counts[1] == count && bytes[0] == count * tensor);
            tutti_ticket_release(ticket);

            tutti_sums(sources.data(), sizes.data(), count, tensors, sums.data());
            tutti_roots(sums.data(), count, tensors, roots.data());
            roots[5] ^= 1;
            const std::uint64_t lane[] = {Scratch::address(staging.data()), Scratch::address(staging.data() + step * size)};
            std::vector<std::uint8_t> states(count);
            std::vector<tutti_ticket *> open(lanes);
            std::vector<std::uint32_t> open_contexts(lanes);
            std::vector<std::uint64_t> places_in_lanes(lanes * step * tensors), one_place(tensors);
            tutti_read read{objects, rows.data(), sizes.data(), roots.data(), lane, places_in_lanes.data(), lanes, step, 0,
                            tutti::now_ns() + 60 * kSecond, 0, 0, states.data(), moved, open.data(), open_contexts.data()};
            tutti_read nothing = read;
            nothing.objects.count = 0;
            tutti_engine_read(scratch.engine, &nothing, &read);
            CHECK(!read.started);  // where nothing is read, nothing is read ahead
            tutti_objects first = objects;
            first.count = 1;
            std::vector<unsigned char> elsewhere(size);
            const std::uint64_t other_lane = Scratch::address(elsewhere.data());
            std::uint8_t state;
            tutti_ticket *its_ticket = nullptr;
            std::uint32_t its_contexts;
            tutti_read before{first, rows.data(), sizes.data(), nullptr, &other_lane, one_place.data(), 1, 1, 0,
                              tutti::now_ns() + 60 * kSecond, 0, 0, &state, moved, &its_ticket, &its_contexts};
            tutti_engine_read(scratch.engine, &before, &read);
            CHECK(state == kWhole && !its_ticket && read.started == lanes && std::ranges::count(open, nullptr) == 0);
            tutti_engine_read(scratch.engine, &read, nullptr);
            CHECK(!read.moved.failed_count && target == content);
            CHECK(states[5] == kAltered && std::ranges::count(states, kWhole) == count - 1);
            std::ranges::fill(target, 0);
            read.straight = 1, read.roots = nullptr, read.started = 0;
            tutti_engine_read(scratch.engine, &read, nullptr);
            CHECK(std::ranges::count(states, kWhole) == count && std::ranges::count(open, nullptr) == lanes && target == content);
            read.straight = 0;
            CHECK(std::ranges::count(open, nullptr) == lanes);

            std::fill(target.begin(), target.end(), 0);
            read.objects.tensors = which.data() + 1;
            read.objects.tensor_count = 1;
            read.rows = part_rows.data();
            read.roots = nullptr;
            read.started = 0;
            tutti_engine_read(scratch.engine, &read, nullptr);
            for (std::uint64_t i = 0; i < content.size(); ++i) CHECK(target[i] == (i / tensor % tensors ? content[i] : 0));
        });
    for (auto &thread : running) thread.join();
}

void a_bad_block_costs_its_own_context(bool pool) {
    const FaultPlan faults{seed, 64 * kPage, 65 * kPage, nullptr, {kStalled, 0, 0, 0, 0, 0}, 0xFFFF, 3, EREMOTEIO, 0};
    Scratch scratch(pool, &faults);
    std::vector<char> memory(128 * kPage);
    std::vector<tutti_ioctx> batch;
    for (std::uint32_t i = 0; i < 128; ++i)
        batch.push_back({Scratch::address(memory.data() + i * kPage), std::uint64_t{i} * kPage, kPage, 0, 0, 0, 0, 0});
    tutti_ticket *ticket = scratch.submit(batch);
    const auto results = scratch.wait(ticket, batch.size(), 60 * kSecond, true);
    for (std::size_t i = 0; i < batch.size(); ++i) CHECK(results[i] == (i == 64 ? -EREMOTEIO : static_cast<int>(kPage)));
    eventually([&] {  // a transfer is counted a moment after its results are there
        tutti_counters counters;
        tutti_engine_counters(scratch.engine, &counters);
        return counters.transfers == 128 * kPage / kMaxIo && counters.retried == kMaxIo / kPage;
    });
    tutti_ticket_release(ticket);
}

std::uint64_t transfers(tutti_engine *engine) {
    tutti_counters counters;
    tutti_engine_counters(engine, &counters);
    return counters.transfers;
}

std::size_t count(const std::vector<std::int32_t> &results, std::int32_t value) {
    return static_cast<std::size_t>(std::ranges::count(results, value));
}

/// A drive that answers only when the gate opens; `act` happens meanwhile and ends what has not started with `error`.
void on_a_hung_drive(bool pool, std::int64_t deadline, std::int32_t error, const std::function<void(Scratch &, tutti_ticket *)> &act) {
    std::uint32_t gate = 0;
    const FaultPlan faults{seed, 0, ~0ull, &gate, {0, 0, 0, 0, 0, kStalled}, 0, 1, EIO, 0};
    std::vector<char> memory;
    const auto batch = pages(memory, 64, 0);
    Scratch scratch(pool, &faults, 4);
    const std::int64_t due = tutti::now_ns() + deadline;
    tutti_ticket *ticket = scratch.submit(batch, 0, deadline);
    eventually([&] { return transfers(scratch.engine) == 4; });
    act(scratch, ticket);
    if (error == -ETIMEDOUT) eventually([&] { return tutti::now_ns() > due; });
    auto results = scratch.wait(ticket, batch.size(), 50 * kMs, false);
    CHECK(count(results, -EINPROGRESS) == 4 && count(results, error) == 60);
    std::atomic_ref(gate).store(1);
    results = scratch.wait(ticket, batch.size(), 60 * kSecond, true);
    CHECK(count(results, static_cast<std::int32_t>(kPage)) == 4 && count(results, error) == 60);
    tutti_ticket_release(ticket);
}

void hung_drives(bool pool) {
    on_a_hung_drive(pool, 500 * kMs, -ETIMEDOUT, [](Scratch &, tutti_ticket *) {});
    on_a_hung_drive(pool, 60 * kSecond, -ECANCELED, [](Scratch &s, tutti_ticket *ticket) { tutti_engine_cancel(s.engine, ticket); });
    on_a_hung_drive(pool, 60 * kSecond, -EBADF, [](Scratch &s, tutti_ticket *) { CHECK(!tutti_engine_detach(s.engine, 0, 0, kMs)); });
    on_a_hung_drive(pool, 60 * kSecond, -ECANCELED, [](Scratch &s, tutti_ticket *) {
        CHECK(!tutti_engine_close(s.engine, 5 * kMs));
        CHECK(!tutti_engine_submit(s.engine, nullptr, 0, 0, 0));
    });
}

void an_engine_is_freed_before_its_drive_answers(bool pool) {
    std::uint32_t gate = 0;
    const FaultPlan faults{seed, 0, ~0ull, &gate, {0, 0, 0, 0, 0, kStalled}, 0, 1, EIO, 0};
    std::vector<char> memory;
    const auto batch = pages(memory, 16, 0);
    const int fd = open((directory + "/0-0").c_str(), O_RDWR | O_CLOEXEC);
    const tutti_options options{kSegment, 0, 0, kMaxIo, 4, 4, pool, &faults};
    tutti_engine *engine = tutti_engine_open(&options);
    CHECK(tutti_engine_attach(engine, 0, 0, fd) == 0);
    tutti_ticket *ticket = tutti_engine_submit(engine, batch.data(), batch.size(), 0, tutti::now_ns() + kSecond);
    eventually([&] { return transfers(engine) == 4; });
    CHECK(tutti_engine_close(engine, 0) == 0);
    tutti_engine_free(engine);
    std::atomic_ref(gate).store(1);
    eventually([&] { return tutti_ticket_done(ticket) == 1; });
    tutti_ticket_release(ticket);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // its threads end by themselves
    close(fd);
}

void submit_detach_and_close_at_once(bool pool) {
    for (int round = 0; round < 20; ++round) {
        Scratch scratch(pool);
        std::vector<std::thread> running;
        for (int me = 0; me < 3; ++me)
            running.emplace_back([&] {
                std::vector<char> memory;
                const auto batch = pages(memory, 100, 0);
                while (tutti_ticket *ticket = scratch.submit(batch)) {
                    for (const auto result : scratch.wait(ticket, batch.size(), 60 * kSecond, true))
                        CHECK(result == static_cast<std::int32_t>(kPage) || result == -EBADF || result == -ECANCELED);
                    tutti_ticket_release(ticket);
                }
            });
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        if (round % 2) CHECK(tutti_engine_detach(scratch.engine, 0, 0, 60 * kSecond));
        CHECK(tutti_engine_close(scratch.engine, 60 * kSecond));
        for (auto &thread : running) thread.join();
    }
}

}  // namespace

int main(int argc, char **argv) {
    CHECK(argc == 3);
    directory = argv[1];
    seed = static_cast<unsigned>(std::atoi(argv[2]));
    const int refused = tutti_uring_probe();
    std::printf("%s\n", refused ? "io_uring is refused: the pool alone" : "io_uring and the pool");
    for (const bool pool : {false, true}) {
        if (refused && !pool) continue;
        threads_read_what_they_wrote(pool);
        whole_objects_through_little_staging(pool);
        a_bad_block_costs_its_own_context(pool);
        hung_drives(pool);
        an_engine_is_freed_before_its_drive_answers(pool);
        submit_detach_and_close_at_once(pool);
    }
}
