// The arithmetic that both tensor-core kernels of packed_plane_attention share, to the bit.
//
// A warp holds 16 query rows, rows g and g + 8 of a thread (mma.cuh). For every tile of 64 keys it
// forms scores S, the weights P and adds P V; at the end of a split it folds the split's sums into
// the row's. A key that a row must not see has the score -inf, set by selection: the state of the
// row is then as if the key were not there. All constants and the order of every sum fix bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "looptrt/fence.cuh"
#include "looptrt/mma.cuh"
#include "packed_plane_attention_splits.h"

namespace looptrt {

constexpr int kRowsAWarp = 16;

__device__ __forceinline__ float negativeInfinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float quietNan() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ float exp2Approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A tile of 16-bit elements in shared memory whose rows ldmatrix reads without bank conflicts:
// the chunks of 16 bytes are exchanged within a row, or rows have an odd number of them.
template <int kHeadDim>
struct TileLayout {
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr bool kSwizzles = kChunks % 8 == 0;
  static constexpr int kStride = kSwizzles ? kChunks : (kChunks | 1);
  static constexpr int kRowBytes = kStride * 16;

  __device__ __forceinline__ static uint32_t byteOffset(int row, int chunk) {
    return row * kRowBytes + 16 * (kSwizzles ? chunk ^ (row & 7) : chunk);
  }
};

// What is known of a row over a range of its keys, for the thread's rows g and g + 8.
struct RowState {
  float top[2];  // largest score * scale * log2(e), -inf before the first key
  float sum[2];  // of the weights, relative to top; a thread's share until quadSum

  __device__ __forceinline__ void clear() {
    top[0] = top[1] = negativeInfinity();
    sum[0] = sum[1] = 0.0f;
  }
  // The rows' whole sums, the same bits in all four threads of a quad.
  __device__ __forceinline__ void quadSum() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = addRn(sum[half], __shfl_xor_sync(0xffffffffu, sum[half], 1));
      sum[half] = addRn(sum[half], __shfl_xor_sync(0xffffffffu, sum[half], 2));
    }
  }
};

// Turns a tile's scores of one of the thread's rows into weights and moves the row's top and sum
// on.
//
// half: 0 for row g, 1 for row g + 8; scores: [8 groups of 8 keys] fragments; scale: positive, with
// log2(e) in it. Returns what earlier weighted sums must be multiplied by.
__device__ __forceinline__ float weigh(float (&scores)[8][4], RowState& state, float scale,
                                       int half) {
  float top = fmaxf(scores[0][2 * half], scores[0][2 * half + 1]);
#pragma unroll
  for (int j = 1; j < 8; ++j) {
    top = fmaxf(top, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
  }
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
  top = fmaxf(state.top[half], mulRn(top, scale));
  float const base = top == negativeInfinity() ? 0.0f : top;
  float const fade = exp2Approximately(subRn(state.top[half], base));
  state.top[half] = top;
  float sums[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      scores[j][i] = exp2Approximately(__fmaf_rn(scores[j][i], scale, -base));
    }
    sums[j] = addRn(scores[j][2 * half], scores[j][2 * half + 1]);
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
#pragma unroll
    for (int j = 0; j < step; ++j) sums[j] = addRn(sums[j], sums[j + step]);
  }
  state.sum[half] = __fmaf_rn(state.sum[half], fade, sums[0]);
  return fade;
}

// scores = Q K of a tile. queries(step, a): left operands of 16 channels; keys: shared memory.
template <typename T, int kHeadDim, typename Queries>
__device__ __forceinline__ void multiplyKeys(float (&scores)[8][4], Queries const& queries,
                                             uint32_t keys) {
  using Layout = TileLayout<kHeadDim>;
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t a[4];
    queries(step, a);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t b[4];
      loadMatrices(
          b, keys + Layout::byteOffset(16 * j + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
      multiplyAdd<T>(scores[2 * j], a, b[0], b[1]);
      multiplyAdd<T>(scores[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// scores = Q K of 16 of a tile's keys, to the bit as multiplyKeys. keys: the first one's row.
template <typename T, int kHeadDim>
__device__ __forceinline__ void multiplySixteenKeys(float (&scores)[2][4],
                                                    uint32_t const (&queries)[kHeadDim / 16][4],
                                                    uint32_t keys) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t b[4];
    loadMatrices(b, keys + TileLayout<kHeadDim>::byteOffset(lane % 8 + lane / 16 * 8,
                                                            2 * step + lane / 8 % 2));
    multiplyAdd<T>(scores[0], queries[step], b[0], b[1]);
    multiplyAdd<T>(scores[1], queries[step], b[2], b[3]);
  }
}

// Takes out the scores of keys after the rows' positions.
__device__ __forceinline__ void hideKeys(float (&scores)[8][4], int first_key,
                                         int const (&positions)[2]) {
  int const key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + 8 * j + i % 2 > positions[i / 2]) scores[j][i] = negativeInfinity();
    }
  }
}

// The weights of 16 keys, rounded to T, as the left operand of P V.
template <typename T>
__device__ __forceinline__ void packWeights(float const (&weights)[8][4], int step,
                                            uint32_t (&packed)[4]) {
  packed[0] = Packed<T>::roundTo(weights[2 * step][0], weights[2 * step][1]);
  packed[1] = Packed<T>::roundTo(weights[2 * step][2], weights[2 * step][3]);
  packed[2] = Packed<T>::roundTo(weights[2 * step + 1][0], weights[2 * step + 1][1]);
  packed[3] = Packed<T>::roundTo(weights[2 * step + 1][2], weights[2 * step + 1][3]);
}

// sums = sums * fade.
template <int kColumns>
__device__ __forceinline__ void fadeSums(float (&sums)[kColumns][4], float const (&fade)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Where no row has a larger score: times 1 changes nothing.
    if (!__any_sync(0xffffffffu, fade[half] != 1.0f)) continue;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) sums[j][i] = mulRn(sums[j][i], fade[half]);
    }
  }
}

// sums = sums + P V of a tile. values: shared memory.
template <typename T, int kHeadDim>
__device__ __forceinline__ void addValues(float (&sums)[kHeadDim / 8][4],
                                          float const (&weights)[8][4], uint32_t values) {
  using Layout = TileLayout<kHeadDim>;
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    uint32_t a[4];
    packWeights<T>(weights, step, a);
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      uint32_t b[4];
      loadMatricesTransposed(b,
                             values + Layout::byteOffset(16 * step + lane % 16, 2 * j + lane / 16));
      multiplyAdd<T>(sums[2 * j], a, b[0], b[1]);
      multiplyAdd<T>(sums[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// addValues of kColumns groups of 8 channels, from group `first` on.
template <typename T, int kHeadDim, int kColumns>
__device__ __forceinline__ void addValueColumns(float (&sums)[kColumns][4],
                                                float const (&weights)[8][4], uint32_t values,
                                                int first) {
  using Layout = TileLayout<kHeadDim>;
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int pair = 0; pair < kTileKeys / 32; ++pair) {
    uint32_t b[kColumns][4];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      loadMatricesTransposed(b[j], values + Layout::byteOffset(32 * pair + lane, first + j));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t a[4];
      packWeights<T>(weights, 2 * pair + step, a);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        multiplyAdd<T>(sums[j], a, b[j][2 * step], b[j][2 * step + 1]);
      }
    }
  }
}

// How a row's total and its next split are put together. A split without keys changes nothing.
struct Fold {
  float top;           // of both
  float total, split;  // factors on what was summed relative to the old tops

  __device__ __forceinline__ Fold(float total_top, float split_top) {
    top = fmaxf(total_top, split_top);
    float const base = top == negativeInfinity() ? 0.0f : top;
    total = exp2Approximately(subRn(total_top, base));
    split = exp2Approximately(subRn(split_top, base));
  }
  __device__ __forceinline__ float operator()(float total_value, float split_value) const {
    return __fmaf_rn(split_value, split, mulRn(total_value, total));
  }
};

// A row's result: its weighted sum over its sum of weights; zero for a row without keys.
struct Normalise {
  float factor;

  __device__ __forceinline__ explicit Normalise(float sum) {
    factor = sum == 0.0f ? 0.0f : __frcp_rn(sum);
  }
  __device__ __forceinline__ float operator()(float value) const { return mulRn(value, factor); }
};

// --- V that is not finite -----------------------------------------------------------------------
// P V multiplies a hidden key's V by 0, which a NaN or an infinity survives. In a tile that not all
// rows see whole, such V is set to 0 first and its key noted; rows that see the key become NaN.

// Zeroes chunks of a tile of 64 keys that hold a number that is not finite, and notes their
// keys in found[2] (shared memory, zero before). For threads 0..num_threads-1 of those at work.
template <typename T, typename Layout>
__device__ __forceinline__ void removeNonFinite(char* tile, uint32_t* found, int thread,
                                                int num_threads) {
  constexpr uint32_t kExponent = Packed<T>::kExponent;
#pragma unroll 4
  for (int i = thread; i < kTileKeys * Layout::kChunks; i += num_threads) {
    int const key = i / Layout::kChunks;
    auto* chunk =
        reinterpret_cast<uint4*>(tile + Layout::byteOffset(key, i - key * Layout::kChunks));
    uint4 const words = *chunk;
    bool is_finite = true;
#pragma unroll
    for (uint32_t word : {words.x, words.y, words.z, words.w}) {
      is_finite &= (word & kExponent) != kExponent;
      is_finite &= (word >> 16 & kExponent) != kExponent;
    }
    if (!is_finite) {
      *chunk = make_uint4(0, 0, 0, 0);
      atomicOr(found + key / 32, 1u << key % 32);
    }
  }
}

// Whether a row at `position` sees one of the found keys of the tile that starts at first_key.
__device__ __forceinline__ bool seesOne(uint2 found, int first_key, int position) {
  int const last = position - first_key;  // last key of the tile that the row sees
  if (last < 0) return false;
  uint64_t const keys = uint64_t{found.y} << 32 | found.x;
  return (last >= 63 ? keys : keys & ((uint64_t{2} << last) - 1)) != 0;
}

}  // namespace looptrt
