// Rotary position embedding on a packed qkv projection, with or without a q/k bias.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

struct FencedRopeParams {
  void* rotated;             // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  void const* qkv;           // as rotated
  void const* bias;          // [(num_heads + num_kv_heads) * head_dim], or null
  int32_t const* positions;  // [num_tokens]
  void const* cos;           // [max_positions, head_dim / 2]
  void const* sin;           // [max_positions, head_dim / 2]
  int64_t num_tokens, max_positions;
  int32_t num_heads, num_kv_heads, head_dim;
  bool is_interleaved;  // pairs (2i, 2i + 1), else (i, i + head_dim / 2)
  DType dtype;
  DType table_dtype;  // dtype or float32: the rotation's arithmetic
};

// Rotates q and k, copies v. rotated may alias qkv.
// Exactness: equals_torch. Bias sum rounded to dtype; every product and sum of the rotation
// rounded to table_dtype, the result to dtype.
// Where kernels start early it reads bias before it waits: see looptrt/launch.cuh for who may write
// it.
// A position outside the tables makes q and k of its token NaN.
// Errors: cudaErrorInvalidValue for an odd head_dim, no heads, or another table_dtype.
// Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchFencedRope(FencedRopeParams const& p, cudaStream_t stream);

}  // namespace looptrt
