#include <cuda_runtime.h>

#include "looptrt/launch.cuh"
#include "update_tables.cuh"

namespace looptrt {
namespace {

constexpr int kBlock = 64;

// One update a block.
__global__ void __launch_bounds__(kBlock) updateTablesKernel(UpdateTablesParams const p) {
  waitForInputsAlone();
  int64_t const update = blockIdx.x;
  int64_t const slot = p.slots[update];
  int64_t const page = p.pages[update];
  if (slot < 0 || slot >= p.max_slots || page < 0 || page >= p.max_pages) return;
  for (int row = threadIdx.x; row < p.num_rows; row += kBlock) {
    p.block_table[(slot * p.num_rows + row) * p.max_pages + page] =
        p.units[update * p.num_rows + row];
  }
}

}  // namespace

cudaError_t launchUpdateTables(UpdateTablesParams const& p, cudaStream_t stream) {
  if (p.num_updates < 0 || p.num_updates > kMaxGridX || p.max_slots < 1 || p.num_rows < 1 ||
      p.max_pages < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.num_updates == 0) return cudaSuccess;
  return launchKernel(updateTablesKernel, dim3(p.num_updates), kBlock, stream, p);
}

}  // namespace looptrt
