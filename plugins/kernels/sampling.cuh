// The next token of every row of logits: greedy, or drawn after temperature, top-k, top-p, min-p.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

struct SamplingParams {
  int32_t* tokens;             // [num_rows]
  int32_t* failed;             // [num_rows] 1 where logits are not all finite: the token is 0 then
  void const* logits;          // [num_rows, vocab]
  double const* temperatures;  // [num_rows], 0: greedy
  double const* top_ps;        // [num_rows]
  double const* min_ps;        // [num_rows]
  int32_t const* top_ks;       // [num_rows], 0: all tokens
  int32_t const* positions;    // [num_rows] of the rows' tokens
  int64_t const* seeds;        // [num_rows]
  int64_t num_rows;
  int32_t vocab;
  DType dtype;
};

// Tokens are ordered by logit, then by id; a draw inverts the cumulative weights with the number in
// [0, 1) that (seed, position) gives. What runtime/sampler.py does, but for rounding: weights
// relative to the most likely token's are whole multiples of 2**-44 here, so that sums are exact.
// Exactness: deterministic; a row's token does not depend on its neighbours.
// Errors: cudaErrorInvalidValue for a vocab below 1 or above 2**19. Never allocates or syncs;
// capture-safe.
[[nodiscard]] cudaError_t launchSampling(SamplingParams const& p, cudaStream_t stream);

}  // namespace looptrt
