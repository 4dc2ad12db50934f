// An NVMe controller in software: serves the commands of queue pairs from segment files, and can be told to misbehave.
//
// It is written against the specification, not against the mover: it knows bus addresses, doorbells and commands, and refuses what a drive
// refuses. Of SGLs it knows data blocks and segments of them.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <bitset>
#include <deque>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <unordered_map>
#include <vector>

#include "../faults.hpp"
#include "bell.hpp"
#include "nvme.cuh"

namespace tutti::gio {

struct ControllerLimits {
    u64 blocks;        // of the namespace
    u64 segment_size;  // bytes: blocks of segment n begin at byte n × segment_size
    u64 spin_ns;       // how long after the last command it looks for the next one without sleeping
    u64 idle_ns;       // how long it sleeps then, unless the bell rings (a GPU can't ring it)
    u32 nsid;
    u32 mdts;          // bytes
    u32 block_shift;
    u32 sgl;           // 0: PRP only
    u32 workers;       // threads that do the I/O; 0: the one that fetches does it, in order
    u32 reserved;
};

// Chances in a million, drawn per command from the seed; all zero = none.
struct ControllerFaults {
    u64 seed;
    u64 delay_ns;  // a delayed completion comes after 0 … delay_ns, so that later ones overtake it
    u32 fail;      // answers `status` and does nothing
    u32 status;
    u32 drop;      // does its work and never answers
    u32 delay;
    u32 reads;     // 1: reads are concerned
    u32 writes;    // 1: writes are concerned
};

struct ControllerCounts {
    u64 commands, bytes, failed, dropped, delayed, fatal;
};

class Controller : public Endpoint {
public:
    explicit Controller(const ControllerLimits& limits);
    ~Controller();

    // The addresses of `queue` are host addresses here. Before start().
    void add_queue(const QueuePair& queue);
    // Memory that the controller may touch, as an IOMMU would grant it.
    void map(const MappedRegion& region);
    bool attach(u64 segment, int fd);  // false: the segment has a file
    bool detach(u64 segment, u64 timeout_ns);  // forgets the file; false: a command is still moving bytes of it
    void set_bad_blocks(const FaultPlan& plan, u32 drive);  // before start()
    void set_faults(const ControllerFaults& faults);
    void start();
    bool stop(u64 timeout_ns);  // false: a thread is stuck in an I/O; the controller must then live for ever
    u32 release_dropped();      // answers late what was dropped
    ControllerCounts counts();

private:
    struct Queue {
        QueuePair pair;
        std::mutex mutex;  // guards the rest
        u32 sq_head = 0;
        u32 cq_tail = 0;
        u32 phase = 1;
        std::bitset<65536> outstanding;
    };
    struct Job {
        u32 queue;
        Sqe sqe;
        u64 serial;
    };
    struct Answer {
        u64 due;
        u32 queue;
        u16 cid;
        u32 status;
        bool operator>(const Answer& other) const { return due > other.due; }
    };

    struct Segment {
        u64 number;
        int fd;
        u32 users;  // commands that move its bytes
    };

    void fetch_loop();
    void work_loop();
    bool fetch(u32 index);
    void serve(const Job& job);
    void answer(const Answer& answer);
    bool post(const Answer& answer);
    bool post_due();
    u32 execute(const Sqe& sqe);
    u32 transfer(const Sqe& sqe, bool write);
    u32 flush();
    u32 move(const Segment& segment, std::vector<iovec> pieces, u64 place, bool write, int flags);
    i64 call(const Segment& segment, const std::vector<iovec>& pieces, u64 place, bool write, int flags);
    std::shared_ptr<Segment> use_segment(u64 number);
    void leave_segment(Segment& segment);

    const ControllerLimits limits_;
    std::vector<std::unique_ptr<Queue>> queues_;

    std::mutex maps_mutex_;  // guards the rest of this block
    std::shared_ptr<const std::vector<MappedRegion>> regions_ = std::make_shared<std::vector<MappedRegion>>();
    std::unordered_map<u64, std::shared_ptr<Segment>> segments_;
    std::vector<std::shared_ptr<Segment>> leaving_;  // detached, perhaps still in use
    std::condition_variable unused_;
    Faults bad_blocks_;
    u32 drive_ = 0;  // which it is for them

    std::mutex mutex_;  // guards the rest
    std::condition_variable work_;
    std::condition_variable ended_;
    std::deque<Job> jobs_;
    std::priority_queue<Answer, std::vector<Answer>, std::greater<>> delayed_;
    std::vector<Answer> dropped_;
    ControllerFaults faults_{};
    ControllerCounts counts_{};
    u64 serial_ = 0;
    u32 alive_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace tutti::gio
