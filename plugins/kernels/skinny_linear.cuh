// A linear layer on a few rows: weights stream through once, at the bandwidth of memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

constexpr int kMaxSkinnyRows = 16;

struct SkinnyLinearParams {
  void* y;             // [num_rows, outputs], no alias of x
  void const* x;       // [num_rows, inputs]
  void const* weight;  // [outputs, inputs]
  int64_t num_rows;    // at most kMaxSkinnyRows
  int32_t outputs, inputs;
  DType dtype;
};

// y = x weight^T, summed in float32 and rounded once to dtype.
// Exactness: batch_invariant. An element's sum is cut and ordered by `inputs` alone: its bits
// depend on its row of x and its row of weight. The order is not cuBLAS's.
// Starts before its predecessor on the stream has ended and reads weight at once: see
// looptrt/launch.cuh for who may write it. x may come from the kernel just before.
// Errors: cudaErrorInvalidValue for too many rows or a size below 1. Never allocates or syncs;
// capture-safe.
[[nodiscard]] cudaError_t launchSkinnyLinear(SkinnyLinearParams const& p, cudaStream_t stream);

}  // namespace looptrt
