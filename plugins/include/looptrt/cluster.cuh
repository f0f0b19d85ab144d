// Blocks of a cluster, which reach into each other's shared memory: sm_90 and later.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace looptrt {

// A barrier of all threads of a cluster in two halves. What was written before arriveAtCluster()
// is seen after waitForCluster(), by every block.
__device__ __forceinline__ void arriveAtCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void waitForCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The place in block `rank` of the cluster that `shared` is in this one.
__device__ __forceinline__ uint32_t inBlock(uint32_t shared, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Two floats to a place of inBlock(), aligned to 8 bytes.
__device__ __forceinline__ void storeInBlock(uint32_t address, float first, float second) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}

}  // namespace looptrt
