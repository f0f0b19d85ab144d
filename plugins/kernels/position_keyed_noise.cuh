// The random initial state as a function of (seed, position, channel).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

struct PositionKeyedNoiseParams {
  void* noise;               // [num_tokens, hidden]
  int32_t const* positions;  // [num_tokens]
  int64_t const* seeds;      // [num_tokens]
  int64_t num_tokens;
  int32_t hidden;
  float std, scale;
  DType dtype;
};

// Exactness: deterministic, and the bits of its CPU twin, plugins/noise.py: float64 from
// + - * / and sqrt, each rounded on its own. std 0 gives +0.
// Errors: cudaErrorInvalidValue if hidden < 1. Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchPositionKeyedNoise(PositionKeyedNoiseParams const& p,
                                                   cudaStream_t stream);

}  // namespace looptrt
