// Sums over rows in the order of PyTorch's CUDA reduction, so that means have its bits.
//
// The order is a function of the row length and of the number of rows (bucketed to 1, 2, 4, 8 and
// 16 or more): that many threads, each with four running sums, then a tree over the threads.
// docs/exactness.md describes it; benchmarks/kernels.py proves it for the PyTorch installed.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "looptrt/fence.cuh"

namespace looptrt {

// All constants here fix bits.
constexpr int kSumLanes = 4;             // running sums of a thread
constexpr int kWarp = 32;                // threads of the last tree
constexpr int kMaxSumThreads = 512;      // threads of one row
constexpr int kMinVectorRow = 128;       // shorter rows are read one element at a time
constexpr int kSplitValuesPerWarp = 16;  // a row is split from this many elements a thread on
constexpr int kMaxValuesPerThread = 256;

// How one row is summed.
//   threads: threads of a row, a power of two, 2**threads_shift; thread t starts at element or
//   vector t and goes on
//     by `threads`.
//   group: threads of an inner tree, `threads` unless the row is split; the sums of the groups,
//     2**groups_shift of them, then go through a tree of their own.
//   is_narrow: running sum c of thread t is element t + c * threads; else thread t sums component
//     c of vectors of four.
//   factor: 1 / hidden as PyTorch rounds it; the mean is sum * factor.
struct RowSumPlan {
  int32_t threads, threads_shift;
  int32_t group, groups_shift;
  bool is_narrow;
  float factor;
};

inline int32_t log2Of(int32_t power) {
  int32_t shift = 0;
  while (1 << shift < power) ++shift;
  return shift;
}

inline int32_t floorPow2(int64_t n) {
  int32_t power = 1;
  while (power * 2 <= n) power *= 2;
  return power;
}

// Plan for [num_rows, hidden] float32 with hidden a multiple of 8, below the length at which
// PyTorch spreads one row over several blocks.
inline RowSumPlan planRowSum(int64_t num_rows, int32_t hidden) {
  RowSumPlan plan{};
  plan.is_narrow = hidden < kMinVectorRow;
  int32_t const columns =
      floorPow2(std::min<int64_t>(plan.is_narrow ? hidden : hidden / kSumLanes, kMaxSumThreads));
  int32_t const rows = floorPow2(std::min<int64_t>(num_rows, kMaxSumThreads));
  int32_t const height = std::min(rows, kMaxSumThreads / std::min(columns, kWarp));
  plan.group = std::min(columns, kMaxSumThreads / height);
  int32_t const values = (hidden + plan.group - 1) / plan.group;
  bool const is_split = values >= std::min(height * kSplitValuesPerWarp, kMaxValuesPerThread);
  plan.threads = is_split ? plan.group * height : plan.group;
  plan.threads_shift = log2Of(plan.threads);
  plan.groups_shift = log2Of(plan.threads / plan.group);
  plan.factor = static_cast<float>(num_rows) / static_cast<float>(num_rows * hidden);
  return plan;
}

constexpr int kMaxSegments = kMaxSumThreads / kWarp;      // warps of a row
constexpr int kSumSlots = kMaxSumThreads + kMaxSegments;  // floats of sumOverThreads

// Tree over kLanes lanes; each of them gets the same bits.
template <int kLanes>
__device__ __forceinline__ float sumLanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = addRn(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Tree over a row of at most a warp's threads, in an aligned group of lanes.
__device__ __forceinline__ float sumInWarp(float value, RowSumPlan const& plan) {
  if (plan.threads == kWarp) return sumLanes<kWarp>(value);
#pragma unroll 1
  for (int offset = plan.threads / 2; offset > 0; offset /= 2) {
    value = addRn(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Tree over a row that the whole block holds; every thread gets the same bits.
//
// One warp sums each group: thread for thread over the group's segments of a warp, then its
// lanes. Where a row has fewer than kMaxSegments segments or groups, zeros take their place: they
// pass through the upper steps of a tree and change nothing, the summands being no less than +0.
// shared: kSumSlots floats; calls may follow each other directly.
__device__ __forceinline__ float sumInBlock(float value, RowSumPlan const& plan, float* shared) {
  int const lane = threadIdx.x % kWarp;
  int const warp = threadIdx.x / kWarp;
  int const segments = plan.group / kWarp;
  int const groups = 1 << plan.groups_shift;
  shared[threadIdx.x] = value;
  __syncthreads();
  if (warp < groups) {
    float sums[kMaxSegments];
    float const* own = shared + warp * plan.group + lane;
#pragma unroll
    for (int i = 0; i < kMaxSegments; ++i) sums[i] = i < segments ? own[i * kWarp] : 0.0f;
#pragma unroll
    for (int level = 1; level < kMaxSegments; level *= 2) {
      int const offset = kMaxSegments / 2 / level;
#pragma unroll
      for (int i = 0; i < kMaxSegments / 2; ++i) {
        if (i < offset) sums[i] = addRn(sums[i], sums[i + offset]);
      }
    }
    float const sum = sumLanes<kWarp>(sums[0]);
    if (lane == 0) shared[kMaxSumThreads + warp] = sum;
  }
  __syncthreads();
  if (groups == 1) return shared[kMaxSumThreads];
  int const group = lane % kMaxSegments;
  return sumLanes<kMaxSegments>(group < groups ? shared[kMaxSumThreads + group] : 0.0f);
}

// Sum of squares of a row in shared memory, planned for a warp, by a block that has one thread
// for each running sum of that warp; every thread gets the same bits.
constexpr int kChainThreads = kWarp * kSumLanes;

// partial: kWarp floats. A barrier must lie between the row's writes and this, and between calls.
template <typename T>
__device__ __forceinline__ float sumSquaresByChains(T const* row, int hidden, float* partial) {
  float sum = 0.0f;
#pragma unroll 8
  for (int i = threadIdx.x; i < hidden; i += kChainThreads) {
    float const x = toFloat(row[i]);
    sum = addRn(sum, mulRn(x, x));
  }
  float total = sum;  // of the running sums of one thread of the plan, in the first of four lanes
#pragma unroll
  for (int c = 1; c < kSumLanes; ++c) {
    total = addRn(total, __shfl_down_sync(0xffffffffu, sum, c));
  }
  if (threadIdx.x % kSumLanes == 0) partial[threadIdx.x / kSumLanes] = total;
  __syncthreads();
  return sumLanes<kWarp>(partial[threadIdx.x % kWarp]);
}

}  // namespace looptrt
