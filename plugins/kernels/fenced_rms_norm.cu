#include <cuda_runtime.h>

#include <algorithm>

#include "fenced_rms_norm.cuh"
#include "fenced_rms_norm_chains.cuh"
#include "fenced_rms_norm_few.cuh"
#include "fenced_rms_norm_general.cuh"
#include "looptrt/dispatch.cuh"

namespace looptrt {
namespace {

constexpr int kMinBlock = 128;               // rows of few threads share a block of this many
constexpr int kMaxRowBytes = 48 * 1024;      // two rows fit in the shared memory of every GPU
constexpr int kFreeSharedBytes = 48 * 1024;  // what a kernel gets without asking
constexpr int kSumBytes = kSumSlots * static_cast<int>(sizeof(float));

using Kernel = void (*)(NormArgs);

template <typename T, NormForm kForm, int kHidden>
Kernel kernelOfFew(int plan_threads) {
  switch (plan_threads) {
    case kMinFewPlan:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, kMinFewPlan>;
    case 2 * kMinFewPlan:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, 2 * kMinFewPlan>;
    case 4 * kMinFewPlan:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, 4 * kMinFewPlan>;
    case kMaxSumThreads:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, kMaxSumThreads>;
  }
  return nullptr;
}

template <typename T, NormForm kForm>
Kernel kernelOfFew(int plan_threads, int hidden) {
  // float32 is no model's dtype on a GPU: it has the general kernel alone.
  if constexpr (sizeof(T) == 2) {
    if (hidden <= kFewHidden) return kernelOfFew<T, kForm, kFewHidden>(plan_threads);
    if (hidden <= 2 * kFewHidden) return kernelOfFew<T, kForm, 2 * kFewHidden>(plan_threads);
    return kernelOfFew<T, kForm, kMaxFewHidden>(plan_threads);
  }
  return nullptr;
}

template <typename T, NormForm kForm>
Kernel kernelOf(Layout layout, RowSumPlan const& plan, int hidden) {
  switch (layout) {
    case Layout::kNarrow:
      return fencedRmsNormKernel<T, Layout::kNarrow, kForm>;
    case Layout::kSingle:
      return fencedRmsNormKernel<T, Layout::kSingle, kForm>;
    case Layout::kShort:
      return fencedRmsNormKernel<T, Layout::kShort, kForm>;
    case Layout::kLong:
      return fencedRmsNormKernel<T, Layout::kLong, kForm>;
    case Layout::kFew:
      return kernelOfFew<T, kForm>(plan.threads, hidden);
    case Layout::kChains:
      return fencedRmsNormByChainsKernel<T, kForm>;
  }
  return nullptr;
}

template <typename T>
Kernel kernelOf(NormForm form, Layout layout, RowSumPlan const& plan, int hidden) {
  switch (form) {
    case NormForm::kNorm:
      return kernelOf<T, NormForm::kNorm>(layout, plan, hidden);
    case NormForm::kAddNorm:
      return kernelOf<T, NormForm::kAddNorm>(layout, plan, hidden);
    case NormForm::kNormAddNorm:
      return kernelOf<T, NormForm::kNormAddNorm>(layout, plan, hidden);
    case NormForm::kAddNormNorm:
      return kernelOf<T, NormForm::kAddNormNorm>(layout, plan, hidden);
    case NormForm::kQkNorm:
      return kernelOf<T, NormForm::kQkNorm>(layout, plan, hidden);
  }
  return nullptr;
}

// Rows that wait in a block's shared memory: x and, where it comes in late, the residual.
int waitingRows(NormForm form, Layout layout) {
  if (layout == Layout::kChains) return form == NormForm::kNormAddNorm ? 2 : 1;
  if (layout == Layout::kLong) return form == NormForm::kNorm || form == NormForm::kQkNorm ? 1 : 2;
  return 0;
}

Layout layoutOf(RowSumPlan const& plan, int hidden, DType dtype) {
  if (plan.is_narrow) return Layout::kNarrow;
  if (dtype != DType::kFloat32 && plan.threads == plan.group && plan.threads >= kMinFewPlan &&
      hidden <= kMaxFewHidden) {
    return Layout::kFew;
  }
  int64_t const vectors = ceilDiv(hidden / kSumLanes, plan.threads);
  if (vectors == 1) return Layout::kSingle;
  if (vectors <= kShortVectors) return Layout::kShort;
  return plan.threads == kWarp ? Layout::kChains : Layout::kLong;
}

// v of [q, k, v], rows stride apart. Grid: x rows.
struct CopyArgs {
  void* to;
  void const* from;
  int64_t row_bytes, stride_bytes;
};

__global__ void __launch_bounds__(kMinBlock) copyRowsKernel(CopyArgs const p) {
  waitForInputs();
  int64_t const offset = blockIdx.x * p.stride_bytes;
  auto const* from = reinterpret_cast<uint4 const*>(static_cast<char const*>(p.from) + offset);
  auto* to = reinterpret_cast<uint4*>(static_cast<char*>(p.to) + offset);
  for (int i = threadIdx.x; i < p.row_bytes / 16; i += kMinBlock) to[i] = from[i];
}

cudaError_t launchNorm(NormForm form, FencedRmsNormParams const& p, cudaStream_t stream,
                       Start start) {
  if (p.hidden < 8 || p.hidden % 8 != 0 || p.row_stride % 8 != 0 || p.num_tokens < 0 ||
      p.hidden * sizeOf(p.dtype) > kMaxRowBytes) {
    return cudaErrorInvalidValue;
  }
  if (!areAligned(16, p.y, p.h, p.x, p.residual, p.weight, p.next_weight)) {
    return cudaErrorMisalignedAddress;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  RowSumPlan const plan = planRowSum(p.num_tokens, p.hidden);
  Layout const layout = layoutOf(plan, p.hidden, p.dtype);
  bool const are_few = layout == Layout::kFew;
  bool const sums_in_block = !are_few && plan.threads > kWarp;
  int const waiting_rows = waitingRows(form, layout);
  int64_t const shared_bytes =
      waiting_rows * p.hidden * sizeOf(p.dtype) + (sums_in_block ? kSumBytes : 0);
  // Rows of at most a warp's threads share a block.
  int const rows_per_block =
      layout == Layout::kChains || plan.threads > kWarp ? 1 : kMinBlock / plan.threads;
  int64_t const grid = ceilDiv(p.num_tokens, rows_per_block);
  if (grid > kMaxGridX) return cudaErrorInvalidValue;
  int const block = layout == Layout::kChains ? kChainThreads
                    : are_few                 ? kFewThreads
                                              : rows_per_block * plan.threads;
  if (are_few) start = startBesideProducts(p.num_tokens);
  NormArgs const args{p, plan, log2Of(rows_per_block), start == Start::kOverlapping};
  return dispatchDType(p.dtype, [&](auto tag) {
    Kernel const kernel = kernelOf<typename decltype(tag)::Type>(form, layout, plan, p.hidden);
    if (shared_bytes > kFreeSharedBytes) {
      if (cudaError_t error = cudaFuncSetAttribute(
              kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
          error != cudaSuccess) {
        return error;
      }
    }
    return launchKernel(kernel, dim3(grid, form == NormForm::kQkNorm ? 3 : 1), block, stream, args,
                        shared_bytes, start);
  });
}

}  // namespace

cudaError_t launchFencedRmsNorm(NormForm form, FencedRmsNormParams const& p, cudaStream_t stream) {
  return launchNorm(form, p, stream, Start::kAfterPrevious);
}

cudaError_t launchFencedQkNorm(FencedQkNormParams const& p, cudaStream_t stream) {
  int64_t const stride = int64_t{p.q_width} + 2 * int64_t{p.k_width};
  int64_t const size = sizeOf(p.dtype);
  auto const* from = static_cast<char const*>(p.qkv);
  auto* to = static_cast<char*>(p.normed);
  FencedRmsNormParams norm{};
  norm.y = to;
  norm.x = from;
  norm.weight = p.q_weight;
  norm.next_weight = p.k_weight;
  norm.num_tokens = p.num_tokens;
  norm.row_stride = stride;
  norm.hidden = p.q_width;
  norm.eps = p.eps;
  norm.dtype = p.dtype;
  if (p.q_width == p.k_width) {
    return launchNorm(NormForm::kQkNorm, norm, stream, Start::kAfterPrevious);
  }
  // Fewer key heads: other plans, so other kernels.
  if (cudaError_t error = launchNorm(NormForm::kNorm, norm, stream, Start::kAfterPrevious);
      error != cudaSuccess) {
    return error;
  }
  int64_t const k_begin = p.q_width * size;
  norm.y = to + k_begin;
  norm.x = from + k_begin;
  norm.weight = p.k_weight;
  norm.hidden = p.k_width;
  if (cudaError_t error = launchNorm(NormForm::kNorm, norm, stream, Start::kOverlapping);
      error != cudaSuccess) {
    return error;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.num_tokens > kMaxGridX) return cudaErrorInvalidValue;
  int64_t const v_begin = k_begin + p.k_width * size;
  CopyArgs const copy{to + v_begin, from + v_begin, p.k_width * size, stride * size};
  return launchKernel(copyRowsKernel, dim3(p.num_tokens), kMinBlock, stream, copy, 0,
                      Start::kOverlapping);
}

}  // namespace looptrt
