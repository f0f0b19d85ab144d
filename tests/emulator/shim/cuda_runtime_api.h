// The part of CUDA's runtime that the library calls, on the emulated machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorMisalignedAddress = 716,
};
using cudaStream_t = void*;

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline char const* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorMisalignedAddress:
      return "cudaErrorMisalignedAddress";
    default:
      return "cudaSuccess";
  }
}
inline char const* cudaGetErrorString(cudaError_t) { return "on the emulated machine"; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = emulator::settings.num_sms;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = __CUDA_ARCH__ / 100;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = emulator::settings.shared_bytes;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > emulator::settings.shared_bytes) return cudaErrorInvalidValue;
  emulator::allowSharedBytes(reinterpret_cast<void const*>(kernel), value);
  return cudaSuccess;
}

struct cudaFuncAttributes {
  size_t sharedSizeBytes;  // of variables; here of all kernels or of none
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  *attributes = {emulator::settings.has_warpgroups ? size_t{4096} : 0};
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

template <typename Params>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(Params),
                               Params const& params) {
  bool const is_valid =
      emulator::enqueue({reinterpret_cast<void const*>(kernel), config->gridDim, config->blockDim.x,
                         config->dynamicSmemBytes, config->numAttrs > 0, [=] { kernel(params); }});
  return is_valid ? cudaSuccess : cudaErrorInvalidConfiguration;
}
