// silu(gate) * up on a fused gate-up projection.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

struct FencedSiluMulParams {
  void* y;              // [num_tokens, width], no alias of gate_up
  void const* gate_up;  // [num_tokens, 2 * width], gate first
  int64_t num_tokens;
  int32_t width;
  DType dtype;
};

// Exactness: equals_torch. silu is x / (1 + expf(-x)) in float32, rounded to dtype; then the
// product rounded.
// Errors: cudaErrorInvalidValue if width < 1. Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchFencedSiluMul(FencedSiluMulParams const& p, cudaStream_t stream);

}  // namespace looptrt
