// What all kernels of the fenced norms share: their arguments, forms and rows, and the sum of
// squares.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fenced_rms_norm.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/row_sum.cuh"
#include "looptrt/vec.cuh"

namespace looptrt {

// rows_shift: log2 of the rows of a block.
struct NormArgs {
  FencedRmsNormParams p;
  RowSumPlan plan;
  int32_t rows_shift;
  bool overlaps;  // the kernel may start before its inputs are there
};

// Sum of squares of one row in PyTorch's order: x.float().pow(2).mean(-1).
// kLanes: running sums of a thread of the plan that this thread has, all four or, in pairs of
// threads, two.
template <int kLanes>
struct SquareSum {
  static_assert(kLanes == kSumLanes || 2 * kLanes == kSumLanes);
  float sums[kLanes] = {};

  SquareSum() = default;
  // Of the first vector: 0 plus a square is the square.
  __device__ __forceinline__ explicit SquareSum(Vec<float, kLanes> const& x) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) sums[c] = mulRn(x[c], x[c]);
  }
  __device__ __forceinline__ void take(Vec<float, kLanes> const& x) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) sums[c] = addRn(sums[c], mulRn(x[c], x[c]));
  }
  // In every thread, or in the first of each pair.
  __device__ __forceinline__ float total() const {
    float sum = sums[0];
#pragma unroll
    for (int c = 1; c < kLanes; ++c) sum = addRn(sum, sums[c]);
    if constexpr (kLanes < kSumLanes) {
#pragma unroll
      for (int c = 0; c < kLanes; ++c) sum = addRn(sum, __shfl_down_sync(0xffffffffu, sums[c], 1));
    }
    return sum;
  }
  // 1 / sqrt(mean + eps), in every thread of the row.
  __device__ __forceinline__ float inverseRms(RowSumPlan const& plan, float eps,
                                              float* shared) const {
    float const own = total();
    float const sum = plan.threads <= kWarp ? sumInWarp(own, plan) : sumInBlock(own, plan, shared);
    return rsqrtf(addRn(mulRn(sum, plan.factor), eps));
  }
};

// x * inverse rounded to T, then times weight rounded to T.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> scale(Vec<T, kSize> const& x, float inverse,
                                               Vec<T, kSize> const& weight) {
  Vec<float, kSize> scaled;
#pragma unroll
  for (int c = 0; c < kSize; ++c) scaled[c] = mulRn(toFloat(x[c]), inverse);
  return mulVec(roundVec<T>(scaled), weight);
}

template <NormForm kForm>
constexpr bool kAddsFirst = kForm == NormForm::kAddNorm || kForm == NormForm::kAddNormNorm;

template <NormForm kForm>
constexpr bool kHasResidual = kForm != NormForm::kNorm && kForm != NormForm::kQkNorm;

template <NormForm kForm>
constexpr bool kHasTwoNorms = kForm == NormForm::kNormAddNorm || kForm == NormForm::kAddNormNorm;

// The row of a block that kNorm works on, or that of q, k or v in kQkNorm: blocks 0, 1 and 2 in y.
template <typename T, NormForm kForm>
struct RowOf {
  T* y;
  T const* x;
  T const* weight;
  bool is_copied;

  __device__ __forceinline__ RowOf(FencedRmsNormParams const& p, int64_t row)
      : y(static_cast<T*>(p.y) + row * p.row_stride),
        x(static_cast<T const*>(p.x) + row * p.row_stride),
        weight(static_cast<T const*>(p.weight)),
        is_copied(false) {
    if constexpr (kForm == NormForm::kQkNorm) {
      y += blockIdx.y * p.hidden;
      x += blockIdx.y * p.hidden;
      if (blockIdx.y == 1) weight = static_cast<T const*>(p.next_weight);
      is_copied = blockIdx.y == 2;
    }
  }
};

}  // namespace looptrt
