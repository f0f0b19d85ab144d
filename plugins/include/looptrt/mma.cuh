// Tensor-core products of 16 x 8 x 16 and the moves of their operands: sm_80 and later.
//
// Fragment layout, with g = lane / 4 and t = lane % 4: an accumulator holds rows g (elements 0, 1)
// and g + 8 (elements 2, 3) of columns 2t and 2t + 1.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace looptrt {

// accumulator += a * b. An element's bits depend on its own row of a and column of b alone.
template <typename T>
__device__ __forceinline__ void multiplyAdd(float (&accumulator)[4], uint32_t const (&a)[4],
                                            uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiplyAdd<__nv_bfloat16>(float (&accumulator)[4],
                                                           uint32_t const (&a)[4], uint32_t b0,
                                                           uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiplyAdd<__half>(float (&accumulator)[4], uint32_t const (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t sharedAddress(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8i..8i+7 give the rows of matrix i.
__device__ __forceinline__ void loadMatrices(uint32_t (&into)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void loadMatricesTransposed(uint32_t (&into)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
               : "r"(row)
               : "memory");
}

// Starts a copy of 16 bytes to shared memory past the L1 cache.
__device__ __forceinline__ void copyAsync16(uint32_t shared, void const* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same; zeros where there is no source, which reads no memory at all: zeros that lie in memory
// would be one place that every block asks for at once. Fetches the rest of a cache line as well:
// of a row of 96 channels half a line is the next head's.
__device__ __forceinline__ void copyChunkOrZero(uint32_t shared, uint4 const* source, int chunk) {
  int const bytes = source == nullptr ? 0 : 16;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(source + chunk), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for this thread's committed copies but the latest kPending groups.
template <int kPending>
__device__ __forceinline__ void waitForCopiesBut() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A barrier for kThreads threads that need not stand at the same place of the code: bar.sync is
// the aligned form, in which they must (and synccheck says so).
template <int kThreads>
__device__ __forceinline__ void syncWarps() {
  asm volatile("barrier.sync 1, %0;" ::"n"(kThreads) : "memory");
}

}  // namespace looptrt
