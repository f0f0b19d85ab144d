#include <cuda_runtime.h>

#include "fenced_silu_mul.cuh"
#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/vec.cuh"

namespace looptrt {
namespace {

constexpr int kBlock = 128;
constexpr int kWide = 8;       // elements a thread makes when the layout allows 16-byte accesses
constexpr int kFewTokens = 8;  // up to here many threads with little to do are faster

__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, addRn(1.0f, expf(-x))); }

// Grid: x tokens, y stretches of kBlock * kElements channels.
template <typename T, int kElements>
__global__ void __launch_bounds__(kBlock) fencedSiluMulKernel(FencedSiluMulParams const p) {
  int const channel = (blockIdx.y * kBlock + threadIdx.x) * kElements;
  letNextStart();
  waitForInputs();
  if (channel >= p.width) return;
  int64_t const token = blockIdx.x;
  T const* from = static_cast<T const*>(p.gate_up) + token * 2 * p.width + channel;
  auto const gate = loadVec<T, kElements>(from);
  auto const up = loadVec<T, kElements>(from + p.width);
  Vec<float, kElements> activated;
#pragma unroll
  for (int i = 0; i < kElements; ++i) activated[i] = silu(toFloat(gate[i]));
  storeVec(static_cast<T*>(p.y) + token * p.width + channel, mulVec(roundVec<T>(activated), up));
}

}  // namespace

cudaError_t launchFencedSiluMul(FencedSiluMulParams const& p, cudaStream_t stream) {
  bool const is_wide =
      p.num_tokens > kFewTokens && p.width % kWide == 0 && areAligned(16, p.y, p.gate_up);
  int64_t const stretches = ceilDiv(p.width, kBlock * (is_wide ? kWide : 1));
  if (p.width < 1 || p.num_tokens < 0 || p.num_tokens > kMaxGridX || stretches > 65535) {
    return cudaErrorInvalidValue;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  dim3 const grid(p.num_tokens, stretches);
  return dispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    auto* kernel = is_wide ? fencedSiluMulKernel<T, kWide> : fencedSiluMulKernel<T, 1>;
    return launchKernel(kernel, grid, kBlock, stream, p, 0, startBesideProducts(p.num_tokens));
  });
}

}  // namespace looptrt
