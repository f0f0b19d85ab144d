#include <cuda_runtime.h>

#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/mix64.cuh"
#include "looptrt/noise_constants.cuh"
#include "position_keyed_noise.cuh"

namespace looptrt {
namespace {

constexpr int kBlock = 256;

// Polynomial with the constant term first, from the highest term down.
template <int kSize>
__device__ __forceinline__ double horner(double const (&coefficients)[kSize], double x) {
  double value = coefficients[kSize - 1];
#pragma unroll
  for (int i = kSize - 2; i >= 0; --i) value = __dadd_rn(__dmul_rn(value, x), coefficients[i]);
  return value;
}

__device__ __forceinline__ double inverseNormalCdf(double p) {
  double const q = __dsub_rn(p, 0.5);
  double const magnitude = fabs(q);
  if (magnitude <= kCentre) {
    double const square = __dmul_rn(q, q);
    return __dmul_rn(q, __ddiv_rn(horner(kCentreTop, square), horner(kCentreBottom, square)));
  }
  double const root = __dsqrt_rn(__dsub_rn(0.5, magnitude));
  return copysign(__ddiv_rn(horner(kTailTop, root), horner(kTailBottom, root)), q);
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    positionKeyedNoiseKernel(PositionKeyedNoiseParams const p) {
  int const channel = blockIdx.y * kBlock + threadIdx.x;
  waitForInputs();
  if (channel >= p.hidden) return;
  int64_t const token = blockIdx.x;
  T* to = static_cast<T*>(p.noise) + token * p.hidden + channel;
  if (p.std == 0.0f) {
    *to = roundTo<T>(0.0f);
    return;
  }
  auto const seed = static_cast<uint64_t>(p.seeds[token]);
  auto const position = static_cast<uint64_t>(static_cast<int64_t>(p.positions[token]));
  uint64_t h = mix64(seed + kSeedKey);
  h = mix64(h ^ mix64(position + kPositionKey));
  h = mix64(h ^ mix64(static_cast<uint64_t>(channel) + kChannelKey));
  double const u = __dmul_rn(__dadd_rn(static_cast<double>(h >> 40), 0.5), 0x1p-24);
  constexpr double kSpan = 1.0 - 2.0 * kTailProbability;
  double const z = inverseNormalCdf(__dadd_rn(kTailProbability, __dmul_rn(u, kSpan)));
  T const drawn = roundTo<T>(__double2float_rn(__dmul_rn(z, static_cast<double>(p.std))));
  *to = roundTo<T>(mulRn(toFloat(drawn), p.scale));
}

}  // namespace

cudaError_t launchPositionKeyedNoise(PositionKeyedNoiseParams const& p, cudaStream_t stream) {
  int64_t const stretches = ceilDiv(p.hidden, kBlock);
  if (p.hidden < 1 || p.num_tokens < 0 || p.num_tokens > kMaxGridX || stretches > 65535) {
    return cudaErrorInvalidValue;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  dim3 const grid(p.num_tokens, stretches);
  return dispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return launchKernel(positionKeyedNoiseKernel<T>, grid, kBlock, stream, p);
  });
}

}  // namespace looptrt
