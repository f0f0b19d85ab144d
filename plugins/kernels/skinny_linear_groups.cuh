// skinny_linear of 9 to 64 rows by warpgroups: sm_90a alone.
#pragma once

#include <cuda_runtime_api.h>

#include "skinny_linear.cuh"

namespace looptrt {

constexpr int kMinGroupRows = 1;

// Whether the current GPU, and the machine code at hand, can.
[[nodiscard]] cudaError_t canLinearByGroups(bool& can);

// As launchSkinnyLinear, for 16-bit dtypes, inputs that are a multiple of 8, pointers aligned to 16
// bytes. Bits of its own, by `inputs` alone.
[[nodiscard]] cudaError_t launchSkinnyLinearByGroups(SkinnyLinearParams const& p,
                                                     cudaStream_t stream);

}  // namespace looptrt
