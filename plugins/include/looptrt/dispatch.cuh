// The library's one switch over element types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "looptrt/dtype.h"

namespace looptrt {

template <typename T>
struct TypeTag {
  using Type = T;
};

// Calls f(TypeTag<T>) for the C++ type of dtype. Returns f's result, or cudaErrorInvalidValue.
template <typename F>
cudaError_t dispatchDType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(TypeTag<float>{});
    case DType::kBFloat16:
      return f(TypeTag<__nv_bfloat16>{});
    case DType::kFloat16:
      return f(TypeTag<__half>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace looptrt
