// The kernels of gio_uring. Launched per batch of IOCBs, never persistent; compiled by NVRTC for the device at hand (kernels/gio_uring.py).
#include "sub_io.cuh"

using namespace tutti::gio;

// Moves the IOCBs first … first + gridDim.y - 1 (in the ring): one thread per sub-I/O, or fewer threads that take several in turn.
extern "C" __global__ void gio_uring(const Context* context, u32 first) {
    const Context c = *context;
    u32 ring = (first + blockIdx.y) % c.depth;
    u32 pieces = iocb_of(c, ring).pieces;
    u32 threads = gridDim.x * blockDim.x;
    for (u32 piece = blockIdx.x * blockDim.x + threadIdx.x; piece < pieces; piece += threads) {
        u32 warp = (blockIdx.y * threads + piece) / 32;  // one queue pair per warp: its SQEs are neighbours, and one doorbell serves them
        run_sub_io(c, ring, piece, warp);
    }
}

// For commands that outlived their kernel: finishes those that were answered meanwhile. Thread x = queue pair x of drive y.
extern "C" __global__ void gio_reap(const Context* context) {
    const Context c = *context;
    const Drive& drive = reinterpret_cast<const Drive*>(c.drives)[blockIdx.y];
    u32 queue = blockIdx.x * blockDim.x + threadIdx.x;
    if (queue < drive.queue_count) reap(c, reinterpret_cast<const QueuePair*>(drive.queues)[queue]);
}

// After a controller reset, with no other kernel of ours running. Thread x = queue pair x of drive `drive`.
extern "C" __global__ void gio_abort(const Context* context, u32 drive) {
    const Context c = *context;
    const Drive& d = reinterpret_cast<const Drive*>(c.drives)[drive];
    u32 queue = blockIdx.x * blockDim.x + threadIdx.x;
    if (queue < d.queue_count) abort_all(c, reinterpret_cast<const QueuePair*>(d.queues)[queue], kAbortedBySqDeletion);
}
