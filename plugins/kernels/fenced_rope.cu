#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "fenced_rope.cuh"
#include "looptrt/dispatch.cuh"
#include "looptrt/divider.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/vec.cuh"

namespace looptrt {
namespace {

constexpr int kBlock = 128;
constexpr int kWidePairs = 8;  // pairs a thread turns when the layout allows 16-byte accesses
constexpr int kWideHeads = 4;  // heads it turns by the same angles
constexpr int kFewTokens = 8;  // up to here many threads with little to do are faster

struct RopeArgs {
  FencedRopeParams p;
  Divider parts;  // stretches of pairs of a head
  bool overlaps;  // the kernel may start before its inputs are there
};

// Turns (first, second) of every pair; the bits of the eager chain in Table's precision.
template <typename T, typename Table, int kPairs>
__device__ __forceinline__ void turn(Vec<T, kPairs>& first, Vec<T, kPairs>& second,
                                     Vec<Table, kPairs> const& cos, Vec<Table, kPairs> const& sin) {
  auto const a = roundVec<Table>(toFloatVec(first));  // T and Table are the same, or Table float
  auto const b = roundVec<Table>(toFloatVec(second));
  first = roundVec<T>(toFloatVec(subVec(mulVec(a, cos), mulVec(b, sin))));
  second = roundVec<T>(toFloatVec(addVec(mulVec(b, cos), mulVec(a, sin))));
}

// Even and odd elements of (low, high) apart, and together again.
template <typename T, int kPairs>
__device__ __forceinline__ void separate(Vec<T, kPairs>& low, Vec<T, kPairs>& high) {
  Vec<T, kPairs> even;
  Vec<T, kPairs> odd;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    auto const& from = 2 * i < kPairs ? low : high;
    even[i] = from[2 * i % kPairs];
    odd[i] = from[(2 * i + 1) % kPairs];
  }
  low = even;
  high = odd;
}

template <typename T, int kPairs>
__device__ __forceinline__ void interleave(Vec<T, kPairs>& low, Vec<T, kPairs>& high) {
  Vec<T, kPairs> const even = low;
  Vec<T, kPairs> const odd = high;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    auto& to = 2 * i < kPairs ? low : high;
    to[2 * i % kPairs] = even[i];
    to[(2 * i + 1) % kPairs] = odd[i];
  }
}

template <typename T, int kPairs>
__device__ __forceinline__ Vec<T, kPairs> notANumber() {
  Vec<T, kPairs> vec;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) vec[i] = roundTo<T>(__int_as_float(0x7fffffff));
  return vec;
}

__device__ __forceinline__ bool isKnown(FencedRopeParams const& p, int64_t position) {
  return position >= 0 && position < p.max_positions;
}

// First element of a position's row of the tables; of row 0 for a position outside them.
__device__ __forceinline__ int64_t angleOf(FencedRopeParams const& p, int64_t position) {
  return isKnown(p, position) ? position * (p.head_dim / 2) : 0;
}

// One thread turns kPairs pairs of kHeads neighbouring heads of one token, or copies their v.
// Grid: x tokens, y stretches of such items.
template <typename T, typename Table, int kPairs, bool kIsInterleaved>
__global__ void __launch_bounds__(kBlock) fencedRopeKernel(RopeArgs const args) {
  constexpr int kHeads = kPairs == 1 ? 1 : kWideHeads;
  FencedRopeParams const& p = args.p;
  int64_t const token = blockIdx.x;
  letNextStart();
  // Interleaved pairs are Huginn's, whose layers stream more weights than L2 holds: tables and bias
  // are wanted again by the next one. Elsewhere they are still there, and asking costs 0.1 us.
  constexpr bool kKeeps = kPairs == 1 && kIsInterleaved;
  uint64_t kept = 0;
  if constexpr (kKeeps) kept = keptInL2();
  auto const loadAgain = [&](auto const* from) {
    using Element = std::decay_t<decltype(*from)>;
    if constexpr (kKeeps) {
      return loadKept(reinterpret_cast<Vec<Element, 1> const*>(from), kept);
    } else {
      return loadVec<Element, kPairs>(from);
    }
  };
  auto const loadPosition = [&] {
    if constexpr (kKeeps) return loadKept(p.positions + token, kept);
    return __ldcg(p.positions + token);
  };
  int32_t position = loadPosition();  // a guess, where the kernel may start early
  int const half = p.head_dim / 2;
  int const rotating_heads = p.num_heads + p.num_kv_heads;
  int const heads = rotating_heads + p.num_kv_heads;
  int const item = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  int const group = args.parts.quotient(item);
  int const first_head = group * kHeads;
  int const pair = (item - group * args.parts.divisor()) * kPairs;
  int const step = kIsInterleaved ? kPairs : half;  // from a thread's low vector to its high one
  int const begin = first_head * p.head_dim + (kIsInterleaved ? 2 * pair : pair);
  bool const has_bias = p.bias != nullptr && first_head < rotating_heads;
  Vec<T, kPairs> low_bias;
  Vec<T, kPairs> high_bias;
  auto const loadBias = [&](int h) {
    T const* bias = static_cast<T const*>(p.bias) + begin + h * p.head_dim;
    low_bias = loadAgain(bias);
    high_bias = loadAgain(bias + step);
  };
  if constexpr (kHeads == 1) {
    if (has_bias) loadBias(0);
  }
  if (args.overlaps && first_head < rotating_heads) {
    int64_t const guess = angleOf(p, position) + pair;
    prefetchLine(static_cast<Table const*>(p.cos) + guess);
    prefetchLine(static_cast<Table const*>(p.sin) + guess);
  }
  waitForInputs();
  if (first_head >= heads) return;
  if (args.overlaps) position = loadPosition();

  int64_t const offset = token * heads * p.head_dim + begin;
  T const* from = static_cast<T const*>(p.qkv) + offset;
  T* to = static_cast<T*>(p.rotated) + offset;
  Vec<T, kPairs> low[kHeads];
  Vec<T, kPairs> high[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first_head + h < heads) {
      low[h] = loadVec<T, kPairs>(from + h * p.head_dim);
      high[h] = loadVec<T, kPairs>(from + h * p.head_dim + step);
    }
  }
  int64_t const angle = angleOf(p, position) + pair;
  auto const cos = loadAgain(static_cast<Table const*>(p.cos) + angle);
  auto const sin = loadAgain(static_cast<Table const*>(p.sin) + angle);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first_head + h < rotating_heads) {
      if (has_bias) {
        if constexpr (kHeads > 1) loadBias(h);
        low[h] = addVec(low[h], low_bias);
        high[h] = addVec(high[h], high_bias);
      }
      if constexpr (kIsInterleaved && kPairs > 1) separate(low[h], high[h]);
      turn(low[h], high[h], cos, sin);
      if constexpr (kIsInterleaved && kPairs > 1) interleave(low[h], high[h]);
      if (!isKnown(p, position)) low[h] = high[h] = notANumber<T, kPairs>();
    }
    if (first_head + h < heads) {
      storeVec(to + h * p.head_dim, low[h]);
      storeVec(to + h * p.head_dim + step, high[h]);
    }
  }
}

template <typename T, typename Table, int kPairs>
cudaError_t launchPairs(FencedRopeParams const& p, cudaStream_t stream) {
  constexpr int kHeads = kPairs == 1 ? 1 : kWideHeads;
  int64_t const heads = int64_t{p.num_heads} + 2 * int64_t{p.num_kv_heads};
  int64_t const parts = p.head_dim / 2 / kPairs;
  int64_t const items = ceilDiv(heads, kHeads) * parts;
  int const block = std::min<int64_t>(ceilDiv(items, 32) * 32, kBlock);
  if (ceilDiv(items, block) > 65535 || p.num_tokens > kMaxGridX) return cudaErrorInvalidValue;
  dim3 const grid(p.num_tokens, ceilDiv(items, block));
  auto* kernel = p.is_interleaved ? fencedRopeKernel<T, Table, kPairs, true>
                                  : fencedRopeKernel<T, Table, kPairs, false>;
  Start const start = startBesideProducts(p.num_tokens);
  RopeArgs const args{p, Divider(parts), start == Start::kOverlapping};
  return launchKernel(kernel, grid, block, stream, args, 0, start);
}

template <typename T, typename Table>
cudaError_t launchTables(FencedRopeParams const& p, cudaStream_t stream) {
  bool const is_wide = p.num_tokens > kFewTokens && p.head_dim / 2 % kWidePairs == 0 &&
                       areAligned(16, p.rotated, p.qkv, p.bias, p.cos, p.sin);
  return is_wide ? launchPairs<T, Table, kWidePairs>(p, stream)
                 : launchPairs<T, Table, 1>(p, stream);
}

}  // namespace

cudaError_t launchFencedRope(FencedRopeParams const& p, cudaStream_t stream) {
  if (p.head_dim < 2 || p.head_dim % 2 != 0 || p.num_heads < 1 || p.num_kv_heads < 1 ||
      p.num_tokens < 0 || (p.table_dtype != p.dtype && p.table_dtype != DType::kFloat32)) {
    return cudaErrorInvalidValue;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  return dispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (p.table_dtype == p.dtype) return launchTables<T, T>(p, stream);
    return launchTables<T, float>(p, stream);
  });
}

}  // namespace looptrt
