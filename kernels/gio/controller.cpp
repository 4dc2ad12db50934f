// The controller's threads: one fetches commands and posts what was held back, the others do the I/O.
#include "controller.hpp"

namespace tutti::gio {

namespace {

// A number in [0, 1000000) that depends on all bits of its argument (splitmix64's finaliser).
u32 draw(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return static_cast<u32>((x ^ x >> 31) % 1000000);
}

constexpr u64 kFullNs = 10000;    // how soon a full CQ is looked at again

}  // namespace

Controller::Controller(const ControllerLimits& limits) : limits_(limits) {}

Controller::~Controller() {
    for (std::thread& thread : threads_)
        if (thread.joinable()) thread.join();
}

void Controller::add_queue(const QueuePair& queue) {
    queues_.push_back(std::make_unique<Queue>());
    queues_.back()->pair = queue;
}

void Controller::map(const MappedRegion& region) {
    std::lock_guard lock(maps_mutex_);
    auto regions = std::make_shared<std::vector<MappedRegion>>(*regions_);
    regions->push_back(region);
    regions_ = regions;
}

bool Controller::attach(u64 segment, int fd) {
    std::lock_guard lock(maps_mutex_);
    return segments_.try_emplace(segment, std::make_shared<Segment>(segment, fd, 0u)).second;
}

bool Controller::detach(u64 segment, u64 timeout_ns) {
    std::unique_lock lock(maps_mutex_);
    if (auto found = segments_.find(segment); found != segments_.end()) {
        leaving_.push_back(found->second);
        segments_.erase(found);
    }
    auto unused = [&] {
        std::erase_if(leaving_, [](const auto& each) { return each->users == 0; });
        return std::ranges::none_of(leaving_, [&](const auto& each) { return each->number == segment; });
    };
    return unused_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), unused);
}

void Controller::set_bad_blocks(const FaultPlan& plan, u32 drive) {
    bad_blocks_ = Faults(&plan);
    drive_ = drive;
}

void Controller::set_faults(const ControllerFaults& faults) {
    std::lock_guard lock(mutex_);
    faults_ = faults;
    serial_ = 0;
}

ControllerCounts Controller::counts() {
    std::lock_guard lock(mutex_);
    return counts_;
}

void Controller::start() {
    std::lock_guard lock(mutex_);
    alive_ = limits_.workers + 1;
    threads_.emplace_back([this] { fetch_loop(); });
    for (u32 i = 0; i < limits_.workers; ++i) threads_.emplace_back([this] { work_loop(); });
}

bool Controller::stop(u64 timeout_ns) {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        work_.notify_all();
    }
    commands.ring();
    {
        std::unique_lock lock(mutex_);
        if (!ended_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return alive_ == 0; })) return false;
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return true;
}

u32 Controller::release_dropped() {
    std::vector<Answer> answers;
    {
        std::lock_guard lock(mutex_);
        answers.swap(dropped_);
    }
    for (const Answer& each : answers) answer({0, each.queue, each.cid, each.status});
    return static_cast<u32>(answers.size());
}

void Controller::fetch_loop() {
    u64 active = now_ns();
    for (;;) {
        u64 seen = commands.count();
        bool busy = false;
        for (u32 i = 0; i < queues_.size(); ++i) busy |= fetch(i);
        busy |= post_due();
        u64 sleep = limits_.idle_ns;
        {
            std::lock_guard lock(mutex_);
            if (stopping_) break;
            if (!delayed_.empty()) sleep = kFullNs;
        }
        u64 now = now_ns();
        if (busy) active = now;
        else if (now - active > limits_.spin_ns) commands.wait(seen, sleep);
        else sched_yield();
    }
    std::lock_guard lock(mutex_);
    if (--alive_ == 0) ended_.notify_all();
}

void Controller::work_loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
        if (stopping_) break;
        Job job = jobs_.front();
        jobs_.pop_front();
        lock.unlock();
        serve(job);
        lock.lock();
    }
    if (--alive_ == 0) ended_.notify_all();
}

// Fetches what the doorbell of queue pair `index` announces.
bool Controller::fetch(u32 index) {
    Queue& queue = *queues_[index];
    u32 entries = 1u << queue.pair.log_entries;
    // Acquire: the commands behind the doorbell. Pairs with ring_doorbell.
    u32 tail = SystemRef<u32>(*reinterpret_cast<u32*>(queue.pair.sq_doorbell)).load(acquire);
    if (tail == queue.sq_head) return false;
    if (tail >= entries) {  // "Invalid Doorbell Write Value": a drive stops serving the queue, too
        std::lock_guard lock(mutex_);
        counts_.fatal = 1;
        return false;
    }
    std::vector<Job> jobs;
    while (queue.sq_head != tail) {
        Sqe sqe = reinterpret_cast<const Sqe*>(queue.pair.sq)[queue.sq_head];
        bool conflict;
        {
            std::lock_guard lock(queue.mutex);
            queue.sq_head = (queue.sq_head + 1) & (entries - 1);
            conflict = queue.outstanding[sqe.cid];
            queue.outstanding[sqe.cid] = true;
        }
        if (conflict) answer({0, index, sqe.cid, kCommandIdConflict});
        else jobs.push_back({index, sqe, 0});
    }
    {
        std::lock_guard lock(mutex_);
        counts_.commands += jobs.size();
        for (Job& job : jobs) {
            job.serial = serial_++;
            if (limits_.workers) jobs_.push_back(job);
        }
        if (limits_.workers) work_.notify_all();
    }
    if (!limits_.workers)
        for (const Job& job : jobs) serve(job);
    return true;
}

void Controller::serve(const Job& job) {
    ControllerFaults faults;
    {
        std::lock_guard lock(mutex_);
        faults = faults_;
    }
    bool concerned = job.sqe.opcode == kNvmeRead ? faults.reads : job.sqe.opcode == kNvmeWrite ? faults.writes : false;
    auto chance = [&](u32 limit, u64 salt) { return concerned && limit && draw(faults.seed * 1000003 + job.serial * 8 + salt) < limit; };
    u32 status = chance(faults.fail, 0) ? faults.status : execute(job.sqe);
    bool drop = chance(faults.drop, 1);
    bool delay = !drop && chance(faults.delay, 2);
    u64 due = delay ? now_ns() + draw(faults.seed + job.serial * 8 + 3) * (faults.delay_ns / 1000000 + 1) : 0;
    {
        std::lock_guard lock(mutex_);
        counts_.failed += status != kSuccess;
        counts_.dropped += drop;
        counts_.delayed += delay;
        if (drop) dropped_.push_back({0, job.queue, job.sqe.cid, status});
    }
    if (!drop) answer({due, job.queue, job.sqe.cid, status});
}

// Posts the answer when it is due and the CQ has room.
void Controller::answer(const Answer& answer) {
    if (answer.due <= now_ns() && post(answer)) {
        if (Bell* bell = completions.load()) bell->ring();
        return;
    }
    std::lock_guard lock(mutex_);
    delayed_.push(answer);
}

bool Controller::post_due() {
    std::vector<Answer> answers;
    {
        std::lock_guard lock(mutex_);
        for (u64 now = now_ns(); !delayed_.empty() && delayed_.top().due <= now; delayed_.pop()) answers.push_back(delayed_.top());
    }
    for (const Answer& each : answers) answer({0, each.queue, each.cid, each.status});
    return !answers.empty();
}

bool Controller::post(const Answer& answer) {
    Queue& queue = *queues_[answer.queue];
    std::lock_guard lock(queue.mutex);
    u32 entries = 1u << queue.pair.log_entries;
    // Acquire: the host has read the entries below its head, so they may be written again. Pairs with ring_doorbell.
    u32 head = SystemRef<u32>(*reinterpret_cast<u32*>(queue.pair.cq_doorbell)).load(acquire);
    if (((queue.cq_tail + 1) & (entries - 1)) == head) return false;
    Cqe& cqe = reinterpret_cast<Cqe*>(queue.pair.cq)[queue.cq_tail];
    cqe.dw0 = cqe.dw1 = 0;
    cqe.sq = queue.sq_head;
    queue.outstanding[answer.cid] = false;
    // Release: the data, and the rest of this entry, before the phase bit.
    SystemRef<u32>(cqe.last).store(answer.cid | queue.phase << 16 | answer.status << 17, release);
    queue.cq_tail = (queue.cq_tail + 1) & (entries - 1);
    if (queue.cq_tail == 0) queue.phase ^= 1;
    return true;
}

}  // namespace tutti::gio
