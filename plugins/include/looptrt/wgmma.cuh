// Tensor-core products of a warpgroup, of 64 rows: sm_90a alone.
//
// Warp w of the group has rows 16 w to 16 w + 15, in the fragments of mma.cuh. The right operand
// lies in shared memory as a SlabTile. An H200 gives an element the same bits as mma.cuh's products
// of the same 16 channels or keys, one after the other (tests/plugins/test_cuda_attention.py).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LOOPTRT_HAS_WARPGROUPS
#endif

namespace looptrt {

// kRows rows of 16-bit elements in shared memory, cut into slabs of columns. Within a slab rows are
// one swizzle wide and chunks of 16 bytes are exchanged as the hardware does, so that neither its
// reads by rows or columns nor ours have bank conflicts. Starts at a multiple of 1024 bytes.
template <int kColumns, int kRows>
struct SlabTile {
  static constexpr int kSlabColumns = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kChunks = kColumns / 8;  // of a row
  static constexpr int kBytes = kRows * kColumns * 2;

  static_assert(kColumns % 32 == 0 && kRows % 8 == 0);

  __device__ __forceinline__ static uint32_t byteOffset(int row, int chunk) {
    int const slab = chunk / kSlabChunks;
    int const within = chunk % kSlabChunks ^ row / (8 / kSlabChunks) % kSlabChunks;
    return slab * kSlabBytes + row * kSlabRowBytes + within * 16;
  }
  // Descriptors of 16 columns of all rows, columns running fastest (K of Q K)...
  __device__ __forceinline__ static uint64_t columnsOf(uint32_t tile, int first) {
    return describe(tile + first / kSlabColumns * kSlabBytes + first % kSlabColumns * 2, 1);
  }
  // ... and of 16 rows of `kColumns` columns, from a slab's first one on (V of P V).
  __device__ __forceinline__ static uint64_t rowsOf(uint32_t tile, int first_row,
                                                    int first_column) {
    return describe(tile + first_column / kSlabColumns * kSlabBytes + first_row * kSlabRowBytes,
                    kSlabBytes);
  }

 private:
  static constexpr int kSlabChunks = kSlabColumns / 8;
  static constexpr int kSlabRowBytes = kSlabColumns * 2;
  static constexpr int kSlabBytes = kRows * kSlabRowBytes;
  static constexpr uint64_t kSwizzle = kSlabColumns == 64 ? 1 : 2;  // of 128 bytes, of 64

  // PTX ISA, "Matrix descriptor": all in units of 16 bytes.
  __device__ __forceinline__ static uint64_t describe(uint32_t address, int leading_bytes) {
    constexpr uint64_t kEightRows = 8 * kSlabRowBytes / 16;
    return (address & 0x3ffff) >> 4 | uint64_t{static_cast<uint32_t>(leading_bytes)} / 16 << 16 |
           kEightRows << 32 | kSwizzle << 62;
  }
};

// d += a * b of 16 channels: rows of b run along d's columns. a, b: columnsOf(). Starts it; the
// last argument is any value of the dtype.
__device__ __forceinline__ void startMultiplyAdd64(float (&d)[8][4], uint64_t a, uint64_t b,
                                                   __nv_bfloat16) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, 1, 1, 1, 0, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "l"(a), "l"(b)
      : "memory");
}

__device__ __forceinline__ void startMultiplyAdd64(float (&d)[8][4], uint64_t a, uint64_t b,
                                                   __half) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, 1, 1, 1, 0, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "l"(a), "l"(b)
      : "memory");
}

// d += a * b of 16 keys, b: rowsOf(), its columns d's: 64 from column 8 kFirst on, or 96. a must
// stay as it is until waitForProducts(), which the compiler does not see to.
template <int kFirst, int kColumns>
__device__ __forceinline__ void startMultiplyAddTransposed64(float (&d)[kColumns][4],
                                                             uint32_t const (&a)[4], uint64_t b,
                                                             __nv_bfloat16) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
      : "+f"(d[kFirst + 0][0]), "+f"(d[kFirst + 0][1]), "+f"(d[kFirst + 0][2]),
        "+f"(d[kFirst + 0][3]), "+f"(d[kFirst + 1][0]), "+f"(d[kFirst + 1][1]),
        "+f"(d[kFirst + 1][2]), "+f"(d[kFirst + 1][3]), "+f"(d[kFirst + 2][0]),
        "+f"(d[kFirst + 2][1]), "+f"(d[kFirst + 2][2]), "+f"(d[kFirst + 2][3]),
        "+f"(d[kFirst + 3][0]), "+f"(d[kFirst + 3][1]), "+f"(d[kFirst + 3][2]),
        "+f"(d[kFirst + 3][3]), "+f"(d[kFirst + 4][0]), "+f"(d[kFirst + 4][1]),
        "+f"(d[kFirst + 4][2]), "+f"(d[kFirst + 4][3]), "+f"(d[kFirst + 5][0]),
        "+f"(d[kFirst + 5][1]), "+f"(d[kFirst + 5][2]), "+f"(d[kFirst + 5][3]),
        "+f"(d[kFirst + 6][0]), "+f"(d[kFirst + 6][1]), "+f"(d[kFirst + 6][2]),
        "+f"(d[kFirst + 6][3]), "+f"(d[kFirst + 7][0]), "+f"(d[kFirst + 7][1]),
        "+f"(d[kFirst + 7][2]), "+f"(d[kFirst + 7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
      : "memory");
}

template <int kFirst, int kColumns>
__device__ __forceinline__ void startMultiplyAddTransposed64(float (&d)[kColumns][4],
                                                             uint32_t const (&a)[4], uint64_t b,
                                                             __half) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
      : "+f"(d[kFirst + 0][0]), "+f"(d[kFirst + 0][1]), "+f"(d[kFirst + 0][2]),
        "+f"(d[kFirst + 0][3]), "+f"(d[kFirst + 1][0]), "+f"(d[kFirst + 1][1]),
        "+f"(d[kFirst + 1][2]), "+f"(d[kFirst + 1][3]), "+f"(d[kFirst + 2][0]),
        "+f"(d[kFirst + 2][1]), "+f"(d[kFirst + 2][2]), "+f"(d[kFirst + 2][3]),
        "+f"(d[kFirst + 3][0]), "+f"(d[kFirst + 3][1]), "+f"(d[kFirst + 3][2]),
        "+f"(d[kFirst + 3][3]), "+f"(d[kFirst + 4][0]), "+f"(d[kFirst + 4][1]),
        "+f"(d[kFirst + 4][2]), "+f"(d[kFirst + 4][3]), "+f"(d[kFirst + 5][0]),
        "+f"(d[kFirst + 5][1]), "+f"(d[kFirst + 5][2]), "+f"(d[kFirst + 5][3]),
        "+f"(d[kFirst + 6][0]), "+f"(d[kFirst + 6][1]), "+f"(d[kFirst + 6][2]),
        "+f"(d[kFirst + 6][3]), "+f"(d[kFirst + 7][0]), "+f"(d[kFirst + 7][1]),
        "+f"(d[kFirst + 7][2]), "+f"(d[kFirst + 7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
      : "memory");
}

template <int kColumns>
__device__ __forceinline__ void startMultiplyAddTransposed96(float (&d)[kColumns][4],
                                                             uint32_t const (&a)[4], uint64_t b,
                                                             __nv_bfloat16) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
      "%40,%41,%42,%43,%44,%45,%46,%47}, "
      "{%48,%49,%50,%51}, %52, 1, 1, 1, 1;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
        "+f"(d[11][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
      : "memory");
}

template <int kColumns>
__device__ __forceinline__ void startMultiplyAddTransposed96(float (&d)[kColumns][4],
                                                             uint32_t const (&a)[4], uint64_t b,
                                                             __half) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
      "%40,%41,%42,%43,%44,%45,%46,%47}, "
      "{%48,%49,%50,%51}, %52, 1, 1, 1, 1;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
        "+f"(d[11][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
      : "memory");
}

// Ties registers to this place of the code: what was written before stays before, what is read
// after stays after. The compiler does not know that a product's registers are in use until the
// wait.
template <int kGroups>
__device__ __forceinline__ void holdHere(float (&registers)[kGroups][4]) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    asm volatile(""
                 : "+f"(registers[j][0]), "+f"(registers[j][1]), "+f"(registers[j][2]),
                   "+f"(registers[j][3])::"memory");
  }
}
template <int kGroups>
__device__ __forceinline__ void holdHere(uint32_t (&registers)[kGroups][4]) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    asm volatile(""
                 : "+r"(registers[j][0]), "+r"(registers[j][1]), "+r"(registers[j][2]),
                   "+r"(registers[j][3])::"memory");
  }
}

// Before the first of some products: their registers have been written.
__device__ __forceinline__ void fenceProducts() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void waitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Lets products read what this thread wrote to shared memory; a barrier must follow.
__device__ __forceinline__ void showToProducts() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace looptrt
