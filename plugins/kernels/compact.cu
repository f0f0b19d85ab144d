#include <cuda_runtime.h>

#include "compact.cuh"
#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/vec.cuh"

namespace looptrt {
namespace {

constexpr int kBlock = 128;
constexpr int kFewRows = 512;  // up to here every block looks for its row in the whole list

// One row a block, copied in words of kElements; from == nullptr writes NaN.
template <typename T, int kElements>
__device__ __forceinline__ void copyRow(T* to, T const* from, int hidden) {
  for (int i = threadIdx.x * kElements; i < hidden; i += kBlock * kElements) {
    Vec<T, kElements> vec;
    if (from != nullptr) {
      vec = loadVec<T, kElements>(from + i);
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) vec[j] = roundTo<T>(__int_as_float(0x7fffffff));
    }
    storeVec(to + i, vec);
  }
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kBlock) compactGatherKernel(CompactGatherParams const p) {
  letNextStart();
  waitForInputs();
  int64_t const index = blockIdx.x;
  int64_t const row = p.rows[index];
  bool const is_known = row >= 0 && row < p.num_tokens;
  T const* from = is_known ? static_cast<T const*>(p.x) + row * p.hidden : nullptr;
  copyRow<T, kElements>(static_cast<T*>(p.gathered) + index * p.hidden, from, p.hidden);
}

// One row of scattered a block, from update where rows has its number, else from x. Rows that
// stand in their own place, all of them mostly, need no search.
template <typename T, int kElements>
__global__ void __launch_bounds__(kBlock) scatterFewKernel(CompactScatterParams const p) {
  __shared__ int found;
  int64_t const token = blockIdx.x;
  letNextStart();
  waitForInputs();
  int64_t index = token < p.num_rows && p.rows[token] == token ? token : -1;
  if (index < 0) {
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < p.num_rows; i += kBlock) {
      if (p.rows[i] == token) found = i;
    }
    __syncthreads();
    index = found;
    if (index < 0 && p.scattered == p.x) return;
  }
  T const* from = index < 0 ? static_cast<T const*>(p.x) + token * p.hidden
                            : static_cast<T const*>(p.update) + index * p.hidden;
  copyRow<T, kElements>(static_cast<T*>(p.scattered) + token * p.hidden, from, p.hidden);
}

// One row of x a block.
template <typename T, int kElements>
__global__ void __launch_bounds__(kBlock) copyAllKernel(CompactScatterParams const p) {
  waitForInputs();
  int64_t const offset = int64_t{blockIdx.x} * p.hidden;
  copyRow<T, kElements>(static_cast<T*>(p.scattered) + offset, static_cast<T const*>(p.x) + offset,
                        p.hidden);
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kBlock) compactScatterKernel(CompactScatterParams const p) {
  waitForInputs();
  int64_t const index = blockIdx.x;
  int64_t const row = p.rows[index];
  if (row < 0 || row >= p.num_tokens) return;
  copyRow<T, kElements>(static_cast<T*>(p.scattered) + row * p.hidden,
                        static_cast<T const*>(p.update) + index * p.hidden, p.hidden);
}

// Elements of 16 bytes where every row starts on 16 bytes, else 1.
template <typename T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

}  // namespace

cudaError_t launchCompactGather(CompactGatherParams const& p, cudaStream_t stream) {
  if (p.hidden < 1 || p.num_tokens < 0 || p.num_rows < 0 || p.num_rows > kMaxGridX) {
    return cudaErrorInvalidValue;
  }
  if (p.num_rows == 0) return cudaSuccess;
  return dispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    bool const is_wide = p.hidden % kWide<T> == 0 && areAligned(16, p.gathered, p.x);
    auto* kernel = is_wide ? compactGatherKernel<T, kWide<T>> : compactGatherKernel<T, 1>;
    return launchKernel(kernel, dim3(p.num_rows), kBlock, stream, p, 0,
                        startBesideProducts(p.num_rows));
  });
}

cudaError_t launchCompactScatter(CompactScatterParams const& p, cudaStream_t stream) {
  if (p.hidden < 1 || p.num_tokens < 0 || p.num_tokens > kMaxGridX || p.num_rows < 0 ||
      p.num_rows > kMaxGridX) {
    return cudaErrorInvalidValue;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  return dispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    bool const is_wide = p.hidden % kWide<T> == 0 && areAligned(16, p.scattered, p.x, p.update);
    if (p.num_rows <= kFewRows) {
      auto* few = is_wide ? scatterFewKernel<T, kWide<T>> : scatterFewKernel<T, 1>;
      return launchKernel(few, dim3(p.num_tokens), kBlock, stream, p, 0,
                          startBesideProducts(p.num_tokens));
    }
    // A kernel of our own: a memcpy node of a graph runs on a copy engine, later and slower.
    if (p.scattered != p.x) {
      auto* copy = is_wide ? copyAllKernel<T, kWide<T>> : copyAllKernel<T, 1>;
      if (cudaError_t error = launchKernel(copy, dim3(p.num_tokens), kBlock, stream, p);
          error != cudaSuccess) {
        return error;
      }
    }
    auto* scatter = is_wide ? compactScatterKernel<T, kWide<T>> : compactScatterKernel<T, 1>;
    return launchKernel(scatter, dim3(p.num_rows), kBlock, stream, p, 0, Start::kOverlapping);
  });
}

}  // namespace looptrt
