// A linear layer on a few rows: weights stream through once, at the bandwidth of memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

constexpr int kMaxSkinnyRows = 64;  // on a GPU with warpgroups; 16 elsewhere

struct SkinnyLinearParams {
  void* y;             // [num_rows, outputs], no alias of x
  void const* x;       // [num_rows, inputs]
  void const* weight;  // [outputs, inputs]
  int64_t num_rows;    // at most mostSkinnyRows()
  int32_t outputs, inputs;
  DType dtype;
};

// y = x weight^T, summed in float32 and rounded once to dtype.
// Exactness: batch_invariant, up to 8 rows (16 where there are no warpgroups) and from there on: an
// element's sum is cut and ordered by `inputs` and by which of the two it is, so that its bits
// depend on its row of x and its row of weight. The order is not cuBLAS's.
// Starts before its predecessor on the stream has ended and reads weight at once: see
// looptrt/launch.cuh for who may write it. x may come from the kernel just before.
// Errors: cudaErrorInvalidValue for too many rows or a size below 1. Never allocates or syncs;
// capture-safe.
[[nodiscard]] cudaError_t launchSkinnyLinear(SkinnyLinearParams const& p, cudaStream_t stream);

// The most rows that launchSkinnyLinear takes on the current GPU.
[[nodiscard]] cudaError_t mostSkinnyRows(int& most);

}  // namespace looptrt
