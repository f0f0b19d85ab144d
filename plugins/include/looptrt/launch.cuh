// How every kernel of the library is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "looptrt/overlap.h"

namespace looptrt {

// When a kernel may start.
enum class Start {
  kAfterPrevious,
  // Before its predecessor on the stream has ended, where the GPU can (compute capability 9.0 and
  // later): hides launch latency behind a kernel of ours, costs some behind others (measured on an
  // H200: 0.2 us after a cuBLAS kernel). Changes no bits.
  kOverlapping,
};

// For a kernel whose neighbours are products of so many rows: cuBLAS's, or, of few rows, ours.
inline Start startBesideProducts(int64_t num_rows) {
  return num_rows <= most_overlapping_rows.load(std::memory_order_relaxed) ? Start::kOverlapping
                                                                           : Start::kAfterPrevious;
}

// Weights (and bias) are read before waitForInputs() by kernels that start early, behind others
// that did, any number of them. So between a kernel that writes a weight and one that reads it so
// there must be one that starts after its predecessor has ended, as every kernel of another library
// does.

// Lets an overlapping kernel start, once every block of this one has called it or ended: worth its
// place before waitForInputs() where the next kernel has something to do meanwhile. The next one's
// waitForInputs() still waits for the end of this kernel.
__device__ __forceinline__ void letNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Blocks until all work before this kernel is done and visible. Every thread of every kernel calls
// it or waitForInputs(), before its first access to memory that the kernel before it may still
// write. In place of waitForInputs() for kernels that write what decode attention reads before it
// waits (block tables, positions, sequences' bounds and slots, the KV pool): the next kernel then
// starts after this one, and so does whatever comes after that. The one exception is a writer whose
// successor is known to wait before it lets another one start (attention's own: the generic kernel,
// decode before its fold).
__device__ __forceinline__ void waitForInputsAlone() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As waitForInputsAlone(); then lets an overlapping kernel start.
__device__ __forceinline__ void waitForInputs() {
  waitForInputsAlone();
  letNextStart();
}

template <typename Params>
cudaError_t launchKernel(void (*kernel)(Params), dim3 grid, int block, cudaStream_t stream,
                         Params const& params, size_t shared_bytes = 0,
                         Start start = Start::kAfterPrevious) {
  int major = 0;
  if (start == Start::kOverlapping) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (cudaError_t error =
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        error != cudaSuccess) {
      return error;
    }
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

constexpr int64_t ceilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Largest grid.x; a launcher of one block a row refuses more rows than this.
constexpr int64_t kMaxGridX = 0x7fffffff;

}  // namespace looptrt
