// What differs between the two targets of the protocol: a GPU (NVRTC) and CPU threads (g++). Everything else is one source.
#pragma once

#if __has_include(<cuda/atomic>)
#include <cuda/atomic>
namespace tutti::gio {
// Local: words that only the mover's own threads touch (in HBM on a GPU, so device scope is enough and stays in L2).
// System: words that the host or a controller touches too.
template <class T> using LocalRef = cuda::atomic_ref<T, cuda::thread_scope_device>;
template <class T> using SystemRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
constexpr auto relaxed = cuda::memory_order_relaxed;
constexpr auto acquire = cuda::memory_order_acquire;
constexpr auto release = cuda::memory_order_release;
constexpr auto acq_rel = cuda::memory_order_acq_rel;
constexpr auto seq_cst = cuda::memory_order_seq_cst;
}  // namespace tutti::gio
#else  // a CPU build without libcu++: the standard's atomics have the same meaning there, since a CPU has one scope
#include <atomic>
namespace tutti::gio {
template <class T> using LocalRef = std::atomic_ref<T>;
template <class T> using SystemRef = std::atomic_ref<T>;
constexpr auto relaxed = std::memory_order_relaxed;
constexpr auto acquire = std::memory_order_acquire;
constexpr auto release = std::memory_order_release;
constexpr auto acq_rel = std::memory_order_acq_rel;
constexpr auto seq_cst = std::memory_order_seq_cst;
}  // namespace tutti::gio
#endif

#ifdef __CUDACC__
#define GIO_FUNCTION __device__ __forceinline__
#else
#include <sched.h>
#include <time.h>
#define GIO_FUNCTION inline
#endif

namespace tutti::gio {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

// Nanoseconds of a clock that only differences of matter for.
GIO_FUNCTION u64 now_ns() {
#ifdef __CUDACC__
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
#else
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<u64>(t.tv_sec) * 1000000000ull + static_cast<u64>(t.tv_nsec);
#endif
}

// Exponential, so that a thousand waiting threads leave the memory system to the one that sweeps.
class Backoff {
public:
    GIO_FUNCTION void pause() {
#ifdef __CUDACC__
        __nanosleep(ns_);
        ns_ = ns_ < 1024 ? 2 * ns_ : ns_;
#else
        sched_yield();
#endif
    }

private:
    [[maybe_unused]] u32 ns_ = 32;
};

GIO_FUNCTION u32 lowest_bit(u32 bits) {
#ifdef __CUDACC__
    return static_cast<u32>(__ffs(static_cast<int>(bits)) - 1);
#else
    return static_cast<u32>(__builtin_ctz(bits));
#endif
}

// Announces a new queue index to a controller.
//
// Everything this thread wrote, or saw written by an acquire, must be visible to the controller before the index is: a device that reads the
// doorbell first fetches a stale SQE. Hence release at system scope; on a GPU as a fence and a store, because the register may be a BAR that
// another device's driver mapped, where .mmio forbids to merge, split or repeat the store. Loads before it are ordered too: the CQ head is
// announced only after the entries before it were read.
GIO_FUNCTION void ring_doorbell(u64 doorbell, u32 index) {
    u32* reg = reinterpret_cast<u32*>(doorbell);
#ifdef __CUDACC__
    cuda::atomic_thread_fence(release, cuda::thread_scope_system);
    asm volatile("st.mmio.relaxed.sys.global.u32 [%0], %1;" ::"l"(reg), "r"(index) : "memory");
#else
    SystemRef<u32>(*reg).store(index, release);
#endif
}

}  // namespace tutti::gio
