// Rows that go on looping, taken out of the full batch and put back.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

struct CompactGatherParams {
  void* gathered;       // [num_rows, hidden], no alias of x
  void const* x;        // [num_tokens, hidden]
  int32_t const* rows;  // [num_rows]
  int64_t num_tokens, num_rows;
  int32_t hidden;
  DType dtype;
};

// gathered = x[rows]; a row outside x reads as NaN.
// Exactness: equals_torch, a copy.
// Errors: cudaErrorInvalidValue if hidden < 1. Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchCompactGather(CompactGatherParams const& p, cudaStream_t stream);

struct CompactScatterParams {
  void* scattered;      // [num_tokens, hidden]; may be x
  void const* x;        // [num_tokens, hidden]
  void const* update;   // [num_rows, hidden], no alias of scattered
  int32_t const* rows;  // [num_rows], all different
  int64_t num_tokens, num_rows;
  int32_t hidden;
  DType dtype;
};

// scattered = x with rows replaced by update; a row outside x is left out.
// Exactness: equals_torch, a copy.
// Errors: cudaErrorInvalidValue if hidden < 1. Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchCompactScatter(CompactScatterParams const& p, cudaStream_t stream);

}  // namespace looptrt
