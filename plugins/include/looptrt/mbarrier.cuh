// Barriers in shared memory that count arrivals (PTX ISA, "mbarrier"): sm_90.
//
// A barrier goes through phases 0, 1, 2, ...; each ends with the last of its arrivals. An address
// is sharedAddress() of a uint64_t.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace looptrt {

__device__ __forceinline__ void makeBarrier(uint32_t barrier, uint32_t arrivals_a_phase) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals_a_phase)
               : "memory");
}

// Shows barriers that this thread has made to the blocks of its cluster and to copies; a barrier
// of the threads that use them must follow.
__device__ __forceinline__ void showBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread did before is seen after a wait for the phase.
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when all copies (cp.async) that this thread has started are there.
__device__ __forceinline__ void arriveWithCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// At a barrier of another block of the cluster: an address of cluster.cuh.
__device__ __forceinline__ void arriveInCluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// Waits for the end of a phase, by its number's lowest bit: of the phase under way, or the one
// before.
__device__ __forceinline__ void waitForPhase(uint32_t barrier, uint32_t parity) {
  uint32_t is_over;
  do {
    asm volatile(
        "{.reg .pred p; "
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(is_over)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!is_over);
}

// The same where other blocks of the cluster arrive.
__device__ __forceinline__ void waitForPhaseInCluster(uint32_t barrier, uint32_t parity) {
  uint32_t is_over;
  do {
    asm volatile(
        "{.reg .pred p; "
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(is_over)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!is_over);
}

}  // namespace looptrt
