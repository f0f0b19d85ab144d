// The fenced norms of few rows, as a decode step has.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fenced_rms_norm_row.cuh"
#include "looptrt/launch.cuh"

namespace looptrt {

constexpr int kFewThreads = 128;  // of a row on fencedRmsNormOfFewKernel
constexpr int kMinFewPlan = 64;   // threads of a plan there
constexpr int kFewHidden = 2048;  // widths up to each multiple have their own kernel
constexpr int kMaxFewHidden = 3 * kFewHidden;
constexpr int kLine = 128;  // bytes

// Neighbours of 16 bits, two a word. As Vec<T, 2 * kWords>, of which the compiler takes each
// element apart, a vector that may be absent costs twice the instructions.
template <int kWords>
using Words = Vec<uint32_t, kWords>;

template <typename T, int kWords>
__device__ __forceinline__ Vec<float, 2 * kWords> toFloats(Words<kWords> const& words) {
  Vec<float, 2 * kWords> wide;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    wide[2 * i] = Packed<T>::low(words[i]);
    wide[2 * i + 1] = Packed<T>::high(words[i]);
  }
  return wide;
}

// The operators of fence.cuh.
template <typename T, int kWords>
__device__ __forceinline__ Words<kWords> addWords(Words<kWords> const& a, Words<kWords> const& b) {
  auto const x = toFloats<T>(a);
  auto const y = toFloats<T>(b);
  Words<kWords> sum;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    sum[i] = Packed<T>::roundTo(addRn(x[2 * i], y[2 * i]), addRn(x[2 * i + 1], y[2 * i + 1]));
  }
  return sum;
}
// As addWords, wide again.
template <typename T, int kWords>
__device__ __forceinline__ Vec<float, 2 * kWords> addWide(Words<kWords> const& a,
                                                          Words<kWords> const& b) {
  auto const x = toFloats<T>(a);
  auto const y = toFloats<T>(b);
  Vec<float, 2 * kWords> sum;
#pragma unroll
  for (int c = 0; c < 2 * kWords; ++c) sum[c] = Packed<T>::rounded(addRn(x[c], y[c]));
  return sum;
}
template <typename T, int kWords>
__device__ __forceinline__ Words<kWords> scaleWords(Vec<float, 2 * kWords> const& x, float inverse,
                                                    Words<kWords> const& weight) {
  Words<kWords> scaled;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    scaled[i] = Packed<T>::roundTo(mulRn(x[2 * i], inverse), mulRn(x[2 * i + 1], inverse));
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) scaled[i] = Packed<T>::mul(scaled[i], weight[i]);
  return scaled;
}

// One row a block, for plans of kMinFewPlan threads and more: a thread stands for kJoined threads
// of the plan, the first steps of whose tree are its own, or has kLanes of the running sums of one
// that kSharing threads share. Every warp takes the rest of the tree alone, so that a sum costs one
// barrier. Few rows are a matter of latency: of how many instructions one multiprocessor issues,
// and of nothing waiting for what could have been asked for before.
// kHidden: a row is at most this wide, and wider than kFewHidden less.
// kPlan: threads of the plan.
template <typename T, NormForm kForm, int kHidden, int kPlan>
__global__ void __launch_bounds__(kFewThreads) fencedRmsNormOfFewKernel(NormArgs const args) {
  constexpr int kJoined = kPlan > kFewThreads ? kPlan / kFewThreads : 1;
  constexpr int kSharing = kPlan < kFewThreads ? kFewThreads / kPlan : 1;
  constexpr int kLanes = kSumLanes / kSharing;
  constexpr int kSlots = kHidden / (kFewThreads * kLanes);
  // Slots that are there: narrower rows have another kernel, and a plan has a vector for each of
  // its threads.
  constexpr int kOfNarrower = (kHidden - kFewHidden) / (kFewThreads * kLanes);
  constexpr int kSure = kOfNarrower > kJoined ? kOfNarrower : kJoined;
  constexpr int kTotals = kFewThreads / kSharing;
  constexpr int kSegments = kTotals / kWarp;
  using Own = Words<kLanes / 2>;
  __shared__ float shared[2][kTotals];
  FencedRmsNormParams const& p = args.p;
  int64_t const row = blockIdx.x;
  int const vectors = p.hidden / kLanes;
  RowOf<T, kForm> const rows(p, row);
  auto const* residual_row = static_cast<T const*>(p.residual) + row * p.hidden;
  letNextStart();

  Own x[kSlots] = {};
  Own residual[kSlots] = {};
  Own weight[kSlots] = {};
  Own next_weight[kSlots] = {};
  auto const has = [&](int slot) {
    return slot < kSure || static_cast<int>(threadIdx.x) + slot * kFewThreads < vectors;
  };
  uint64_t const kept = keptInL2();
  auto const load = [&](Own(&into)[kSlots], void const* from, bool is_kept) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (has(slot)) {
        auto const* vec = static_cast<Own const*>(from) + threadIdx.x + slot * kFewThreads;
        into[slot] = is_kept ? loadKept(vec, kept) : *vec;
      }
    }
  };
  auto const loadWeights = [&] {
    load(weight, rows.weight, true);
    if constexpr (kHasTwoNorms<kForm>) load(next_weight, p.next_weight, true);
  };
  auto const loadInputs = [&] {
    if constexpr (kHasResidual<kForm>) load(residual, residual_row, true);
    load(x, rows.x, false);
  };
  // Weights need no waiting, but come after what is needed first where that is there. Where both
  // are in one branch, the compiler puts the weights off until x is summed.
  if (args.overlaps) {
    loadWeights();
    if constexpr (kHasResidual<kForm>) {
      int const line = threadIdx.x * (kLine / static_cast<int>(sizeof(T)));
      if (line < p.hidden) prefetchLine(residual_row + line);
    }
    waitForInputs();
    loadInputs();
  } else {
    waitForInputs();
    loadInputs();
    loadWeights();
  }
  auto const store = [&](void* to, int slot, Own const& value) {
    if (has(slot)) static_cast<Own*>(to)[threadIdx.x + slot * kFewThreads] = value;
  };
  if (rows.is_copied) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) store(rows.y, slot, x[slot]);
    return;
  }

  Vec<float, kLanes> wide[kSlots];
  // 1 / sqrt(mean + eps) of wide; calls meanwhile() where that waits.
  auto const inverseRms = [&](float* between, auto&& meanwhile) {
    float own[kJoined];
#pragma unroll
    for (int i = 0; i < kJoined; ++i) {
      SquareSum<kLanes> sum(wide[i]);
#pragma unroll
      for (int slot = i + kJoined; slot < kSlots; slot += kJoined) sum.take(wide[slot]);
      own[i] = sum.total();
    }
#pragma unroll
    for (int offset = kJoined / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < offset; ++i) own[i] = addRn(own[i], own[i + offset]);
    }
    if (threadIdx.x % kSharing == 0) between[threadIdx.x / kSharing] = own[0];
    __syncthreads();
    float sums[kSegments];
#pragma unroll
    for (int i = 0; i < kSegments; ++i) sums[i] = between[i * kWarp + threadIdx.x % kWarp];
#pragma unroll
    for (int offset = kSegments / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < offset; ++i) sums[i] = addRn(sums[i], sums[i + offset]);
    }
    float const sum = sumLanes<kWarp>(sums[0]);
    meanwhile();
    return rsqrtf(addRn(mulRn(sum, args.plan.factor), p.eps));
  };
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    if constexpr (kAddsFirst<kForm>) {
      wide[slot] = addWide<T>(x[slot], residual[slot]);
    } else {
      wide[slot] = toFloats<T>(x[slot]);
    }
  }
  float inverse = inverseRms(shared[0], [] {});
  if constexpr (kHasTwoNorms<kForm>) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      x[slot] = scaleWords<T>(wide[slot], inverse, weight[slot]);
      if constexpr (!kAddsFirst<kForm>) x[slot] = addWords<T>(residual[slot], x[slot]);
      wide[slot] = toFloats<T>(x[slot]);
    }
    inverse = inverseRms(shared[1], [&] {
      auto* h = static_cast<T*>(p.h) + row * p.hidden;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        if (has(slot)) {
          // The residual of a norm to come.
          storeKept(reinterpret_cast<Own*>(h) + threadIdx.x + slot * kFewThreads, x[slot], kept);
        }
      }
    });
  }
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    store(
        rows.y, slot,
        scaleWords<T>(wide[slot], inverse, kHasTwoNorms<kForm> ? next_weight[slot] : weight[slot]));
  }
}

}  // namespace looptrt
