#include <cuda_runtime.h>

#include "looptrt/launch.cuh"
#include "looptrt/vec.cuh"
#include "plane_copy.cuh"

namespace looptrt {
namespace {

constexpr int kBlock = 256;

enum class Direction { kToWorkspace, kFromWorkspace };

__device__ __forceinline__ bool isUnit(int64_t unit, int64_t num_units) {
  return unit > 0 && unit < num_units;
}

// Grid: x copies, y halves (K, V) of layer slots. A range is contiguous in each of them.
template <typename Word, Direction kDirection>
__global__ void __launch_bounds__(kBlock) planeCopyKernel(PlaneCopyParams const p) {
  if constexpr (kDirection == Direction::kToWorkspace) {
    waitForInputs();
  } else {
    waitForInputsAlone();
  }
  int64_t const copy = blockIdx.x;
  int64_t const num_units = p.kv_pool[1];
  int64_t const src = p.src_units[copy];
  int64_t const dst = p.dst_units[copy];
  if (!isUnit(src, num_units) || !isUnit(dst, num_units)) return;
  int const begin = max(p.token_begin[copy], 0);
  int const end = min(p.token_end[copy], p.page_size);

  int64_t const halves = int64_t{2} * p.unit_slots;
  int64_t const half_bytes = int64_t{p.page_size} * p.token_bytes;
  int64_t const unit = kDirection == Direction::kToWorkspace ? src : dst;
  auto* in_pool = reinterpret_cast<char*>(p.kv_pool[0]) + (unit * halves + blockIdx.y) * half_bytes;
  auto* in_workspace = static_cast<char*>(p.workspace) + (copy * halves + blockIdx.y) * half_bytes;
  auto const* from =
      reinterpret_cast<Word const*>(kDirection == Direction::kToWorkspace ? in_pool : in_workspace);
  auto* to =
      reinterpret_cast<Word*>(kDirection == Direction::kToWorkspace ? in_workspace : in_pool);
  int64_t const words = p.token_bytes / static_cast<int>(sizeof(Word));
  for (int64_t i = begin * words + threadIdx.x; i < end * words; i += kBlock) to[i] = from[i];
}

template <typename Word>
cudaError_t launchBoth(PlaneCopyParams const& p, cudaStream_t stream) {
  dim3 const grid(p.num_copies, 2 * p.unit_slots);
  if (cudaError_t error =
          launchKernel(planeCopyKernel<Word, Direction::kToWorkspace>, grid, kBlock, stream, p);
      error != cudaSuccess) {
    return error;
  }
  return launchKernel(planeCopyKernel<Word, Direction::kFromWorkspace>, grid, kBlock, stream, p, 0,
                      Start::kOverlapping);
}

}  // namespace

size_t planeCopyWorkspaceBytes(PlaneCopyParams const& p) {
  return static_cast<size_t>(p.num_copies) * 2 * p.unit_slots * p.page_size * p.token_bytes;
}

cudaError_t launchPlaneCopy(PlaneCopyParams const& p, cudaStream_t stream) {
  if (p.num_copies < 0 || p.num_copies > kMaxGridX || p.unit_slots < 1 || p.unit_slots > 32767 ||
      p.page_size < 1 || p.token_bytes < 4 || p.token_bytes % 4 != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.num_copies == 0) return cudaSuccess;
  // The pool is one allocation of cudaMalloc: unit 0 starts on 256 bytes.
  if (p.token_bytes % 16 == 0 && isAligned(p.workspace, 16)) return launchBoth<uint4>(p, stream);
  return launchBoth<uint32_t>(p, stream);
}

}  // namespace looptrt
