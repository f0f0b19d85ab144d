// RMSNorm as PyTorch's eager chain computes it, alone and joined with residual adds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

// What one kernel does, norm(v; w) being the eager chain of plugins/reference.py.
enum class NormForm {
  kNorm,         // y = norm(x; weight)
  kAddNorm,      // y = norm(x + residual; weight)
  kNormAddNorm,  // h = residual + norm(x; weight), y = norm(h; next_weight)
  kAddNormNorm,  // h = norm(x + residual; weight), y = norm(h; next_weight)
  kQkNorm,  // rows of x are [q, k, v], each hidden wide: norm(q; weight), norm(k; next_weight), v
};

struct FencedRmsNormParams {
  void* y;                  // [num_tokens, hidden], rows row_stride apart; may alias x
  void* h;                  // [num_tokens, hidden] of the forms that have it; may alias residual
  void const* x;            // [num_tokens, hidden], rows row_stride apart
  void const* residual;     // [num_tokens, hidden] of the forms that have it
  void const* weight;       // [hidden]
  void const* next_weight;  // [hidden] of the forms that have it
  int64_t num_tokens;
  int64_t
      row_stride;  // in elements, hidden for contiguous rows; hidden in forms with h or residual
  int32_t hidden;
  float eps;
  DType dtype;
};

// Exactness: equals_torch. Row sums in PyTorch's order for this width and row count, every
// rounding fenced.
// Errors: cudaErrorInvalidValue unless hidden and row_stride are multiples of 8 and a row takes at
// most 48 KiB; cudaErrorMisalignedAddress unless pointers are aligned to 16 bytes.
// Where kernels start early it reads weights before it waits: see looptrt/launch.cuh for who may
// write them.
// Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchFencedRmsNorm(NormForm form, FencedRmsNormParams const& p,
                                              cudaStream_t stream);

struct FencedQkNormParams {
  void* normed;          // [num_tokens, q_width + 2 * k_width], no alias of qkv
  void const* qkv;       // [num_tokens, q_width + 2 * k_width]
  void const* q_weight;  // [q_width]
  void const* k_weight;  // [k_width]
  int64_t num_tokens;
  int32_t q_width, k_width;
  float eps;
  DType dtype;
};

// Norm of the whole q and of the whole k; v is copied.
// Exactness and errors: as launchFencedRmsNorm, for both widths.
[[nodiscard]] cudaError_t launchFencedQkNorm(FencedQkNormParams const& p, cudaStream_t stream);

}  // namespace looptrt
