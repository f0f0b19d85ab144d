#include <cuda_runtime.h>

#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/vec.cuh"
#include "packed_plane_attention_forms.cuh"

namespace looptrt {
namespace {

constexpr int kWarps = 4;
constexpr int kBlock = kWarps * 32;
constexpr int kWriteBlock = 128;
constexpr int kChannels = kMaxHeadDim / 32;  // of a lane

// One row of qkv a block: its K and V are two runs of memory there and in the unit.
__global__ void __launch_bounds__(kWriteBlock) writeKvKernel(AttentionArgs const args) {
  waitForInputs();
  int32_t const row = blockIdx.x;
  int32_t const sequence = sequenceOf(args, row);
  int32_t const position = args.p.positions[row];
  if (sequence == args.p.num_sequences || !isPosition(args, position)) return;
  int64_t const offset = kvOffset(args, tableOf(args, sequence), args.p.kv_pool[1], position, 0);
  if (offset < 0) return;
  int64_t const element = args.element_bytes;
  int64_t const run = args.layer.tokenStride() * element / 16;
  auto const* const from = reinterpret_cast<uint4 const*>(static_cast<char const*>(args.p.qkv) +
                                                          newKeyOffset(args, row, 0) * element);
  auto* const to =
      reinterpret_cast<uint4*>(reinterpret_cast<char*>(args.p.kv_pool[0]) + offset * element);
  int64_t const half = args.layer.halfStride() * element / 16;
  for (int64_t i = threadIdx.x; i < run; i += kWriteBlock) {
    to[i] = from[i];
    to[half + i] = from[run + i];
  }
}

__device__ __forceinline__ float maxOfWarp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ __forceinline__ float sumOfWarp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = addRn(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// A row and head a warp, 32 keys at a time from position 0 on: a key a lane for the scores, then
// channels lane, lane + 32, ... for the weighted sum. Grid: x rows, y heads in fours.
template <typename T>
__global__ void __launch_bounds__(kBlock) genericAttentionKernel(AttentionArgs const args) {
  __shared__ float queries[kWarps][kMaxHeadDim];
  waitForInputs();
  PackedPlaneAttentionParams const& p = args.p;
  int const lane = threadIdx.x % 32;
  int const row = blockIdx.x;
  int const head = blockIdx.y * kWarps + threadIdx.x / 32;
  int32_t const sequence = sequenceOf(args, row);
  if (head >= p.num_heads || sequence == p.num_sequences) return;
  float* const query = queries[threadIdx.x / 32];
  T const* const from = static_cast<T const*>(p.qkv) + row * qkvWidth(args) + head * p.head_dim;
  for (int i = lane; i < p.head_dim; i += 32) query[i] = toFloat(from[i]);
  __syncwarp();

  int32_t const* const table = tableOf(args, sequence);
  auto const* const pool = reinterpret_cast<T const*>(p.kv_pool[0]);
  int64_t const num_units = p.kv_pool[1];
  int const kv_head = head / args.group;
  int const position = p.positions[row];
  bool const is_known = table != nullptr && isPosition(args, position);
  int const last = is_known ? position : -1;
  float top = __int_as_float(0xff800000);
  float sum = 0.0f;
  float result[kChannels] = {};
  for (int first = 0; first <= last; first += 32) {
    int const key = first + lane;
    int64_t const offset = key > last ? -1 : kvOffset(args, table, num_units, key, kv_head);
    float score = 0.0f;
    if (offset >= 0) {
      for (int i = 0; i < p.head_dim; i += 8) {
        Vec<float, 8> const k = toFloatVec(loadVec<T, 8>(pool + offset + i));
#pragma unroll
        for (int j = 0; j < 8; ++j) score = __fmaf_rn(query[i + j], k[j], score);
      }
    }
    score = key > last ? __int_as_float(0xff800000) : mulRn(score, args.scale);
    float const higher = fmaxf(top, maxOfWarp(score));
    float const base = higher == __int_as_float(0xff800000) ? 0.0f : higher;
    float const fade = exp2f(subRn(top, base));
    float const weight = exp2f(subRn(score, base));
    top = higher;
    sum = __fmaf_rn(sum, fade, sumOfWarp(weight));
#pragma unroll
    for (int i = 0; i < kChannels; ++i) result[i] = mulRn(result[i], fade);
    int const count = min(32, last - first + 1);
    for (int k = 0; k < count; ++k) {
      float const w = __shfl_sync(0xffffffffu, weight, k);
      int64_t const place = __shfl_sync(0xffffffffu, offset, k);
      if (place < 0) continue;
      T const* const value = pool + place + args.layer.halfStride();
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        int const channel = lane + 32 * i;
        if (channel < p.head_dim) result[i] = __fmaf_rn(w, toFloat(value[channel]), result[i]);
      }
    }
  }
  T* const to = static_cast<T*>(p.attended) + (int64_t{row} * p.num_heads + head) * p.head_dim;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    int const channel = lane + 32 * i;
    if (channel >= p.head_dim) continue;
    to[channel] = roundTo<T>(is_known ? __fdiv_rn(result[i], sum) : __int_as_float(0x7fffffff));
  }
}

}  // namespace

cudaError_t launchGenericAttention(AttentionArgs const& args, cudaStream_t stream) {
  if (cudaError_t error = launchKernel(writeKvKernel, dim3(args.p.num_rows), kWriteBlock, stream,
                                       args, 0, Start::kOverlapping);
      error != cudaSuccess) {
    return error;
  }
  dim3 const grid(args.p.num_rows, ceilDiv(args.p.num_heads, kWarps));
  return dispatchDType(args.p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return launchKernel(genericAttentionKernel<T>, grid, kBlock, stream, args, 0,
                        Start::kOverlapping);
  });
}

}  // namespace looptrt
