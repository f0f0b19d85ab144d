// The fenced norms of many rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fenced_rms_norm_row.cuh"
#include "looptrt/launch.cuh"

namespace looptrt {

// One row a block, in shared memory, so that every thread has whole 16-byte vectors in the
// elementwise passes and one running sum in between: many rows at the bandwidth of memory.
template <typename T, NormForm kForm>
__global__ void __launch_bounds__(kChainThreads) fencedRmsNormByChainsKernel(NormArgs const args) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(T));
  constexpr int kStep = kChainThreads * kWide;
  constexpr int kSlots = 3;
  extern __shared__ uint4 shared[];
  __shared__ float partial[kWarp];
  FencedRmsNormParams const& p = args.p;
  int64_t const row = blockIdx.x;
  auto* waiting = reinterpret_cast<T*>(shared);
  auto* waiting_residual = waiting + p.hidden;
  RowOf<T, kForm> const rows(p, row);
  auto const* x = rows.x;
  auto const* residual = static_cast<T const*>(p.residual) + row * p.hidden;
  int const first = threadIdx.x * kWide;
  waitForInputs();
  if constexpr (kAddsFirst<kForm>) {
    for (int begin = first; begin < p.hidden; begin += kSlots * kStep) {
      Vec<T, kWide> xs[kSlots];
      Vec<T, kWide> residuals[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) {
          xs[slot] = loadVec<T, kWide>(x + i);
          residuals[slot] = loadVec<T, kWide>(residual + i);
        }
      }
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) storeVec(waiting + i, addVec(xs[slot], residuals[slot]));
      }
    }
  } else {
    for (int i = first; i < p.hidden; i += kStep) {
      copyVecAsync<T, kWide>(waiting + i, x + i);
      if constexpr (kHasResidual<kForm>) {
        copyVecAsync<T, kWide>(waiting_residual + i, residual + i);
      }
    }
    waitForCopies();
  }
  if (rows.is_copied) {
    for (int i = first; i < p.hidden; i += kStep) {
      storeVec(rows.y + i, loadVec<T, kWide>(waiting + i));
    }
    return;
  }
  __syncthreads();

  auto const inverseRms = [&] {
    float const sum = sumSquaresByChains(waiting, p.hidden, partial);
    return rsqrtf(addRn(mulRn(sum, args.plan.factor), p.eps));
  };
  // Calls store(i, vector i of the row scaled), for a thread's own vectors: reads before writes.
  auto const scaleRow = [&](T const* weight, float inverse, auto&& store) {
    for (int begin = first; begin < p.hidden; begin += kSlots * kStep) {
      Vec<T, kWide> weights[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) weights[slot] = loadVec<T, kWide>(weight + i);
      }
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) store(i, scale(loadVec<T, kWide>(waiting + i), inverse, weights[slot]));
      }
    }
  };
  auto const* last_weight = rows.weight;
  float inverse = inverseRms();
  if constexpr (kHasTwoNorms<kForm>) {
    auto* h = static_cast<T*>(p.h) + row * p.hidden;
    __syncthreads();
    scaleRow(last_weight, inverse, [&](int i, Vec<T, kWide> v) {
      if constexpr (!kAddsFirst<kForm>) v = addVec(loadVec<T, kWide>(waiting_residual + i), v);
      storeVec(waiting + i, v);
      storeVec(h + i, v);
    });
    __syncthreads();
    last_weight = static_cast<T const*>(p.next_weight);
    inverse = inverseRms();
  }
  scaleRow(last_weight, inverse, [&](int i, Vec<T, kWide> const& v) { storeVec(rows.y + i, v); });
}

}  // namespace looptrt
