#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "looptrt/vec.cuh"
#include "packed_plane_attention_forms.cuh"

namespace looptrt {
namespace {

constexpr int kFewPairs = 16;  // (row, head) pairs of a sequence that is decoded, at most
constexpr float kLog2E = 1.44269504088896340736f;

bool hasTensorCoreKernel(PackedPlaneAttentionParams const& p) {
  return dispatchTensorCores(p, [](auto, auto) { return cudaSuccess; }) == cudaSuccess;
}

bool areSizesValid(PackedPlaneAttentionParams const& p) {
  return p.num_rows >= 0 && p.num_rows <= kMaxGridX && p.num_sequences >= 0 && p.max_pages > 0 &&
         p.page_size > 0 && int64_t{p.max_pages} * p.page_size <= kMaxPositions &&
         p.num_heads > 0 && p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0 &&
         p.num_heads <= 65535 && p.head_dim > 0 && p.head_dim % 8 == 0 && p.head_dim <= kMaxHeadDim;
}

bool isValid(PackedPlaneAttentionParams const& p) {
  return areSizesValid(p) && p.max_slots > 0 && p.table_rows > 0 && p.slot >= 0 &&
         p.slot < p.unit_slots && p.scale > 0.0f && std::isfinite(p.scale);
}

// Everything but the device's limits.
AttentionArgs argsOf(PackedPlaneAttentionParams const& p) {
  int32_t const max_positions = p.max_pages * p.page_size;
  int32_t const group = p.num_heads / p.num_kv_heads;
  int32_t const heads_a_tile = std::min(group, kTilePairs);
  return AttentionArgs{p, LayerSlot{p.unit_slots, p.slot, p.page_size, p.num_kv_heads, p.head_dim},
                       PageDivider(p.page_size), static_cast<int32_t>(sizeOf(p.dtype)),
                       max_positions, splitOf(max_positions - 1) + 1, group,
                       std::max(kFewPairs / group, 1), std::max(kTilePairs / group, 1),
                       heads_a_tile, static_cast<int32_t>(ceilDiv(group, heads_a_tile)),
                       p.scale * kLog2E,
                       // Without more rows than sequences most have one, and one kernel is enough.
                       p.num_rows <= p.num_sequences, 0, 0};
}

}  // namespace

size_t packedPlaneAttentionWorkspaceBytes(PackedPlaneAttentionParams const& p) {
  if (!areSizesValid(p) || !hasTensorCoreKernel(p)) return 0;
  AttentionArgs const args = argsOf(p);
  if (args.max_splits == 1) return 0;
  return static_cast<size_t>(args.partialRows()) * p.num_heads * args.max_splits *
         (p.head_dim + 2) * sizeof(float);
}

cudaError_t launchPackedPlaneAttention(PackedPlaneAttentionParams const& p, cudaStream_t stream) {
  if (!isValid(p)) return cudaErrorInvalidValue;
  if (!areAligned(16, p.qkv, p.attended, p.workspace)) return cudaErrorMisalignedAddress;
  if (p.num_rows == 0) return cudaSuccess;
  AttentionArgs args = argsOf(p);
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  for (auto const& [value, attribute] :
       {std::pair{&args.num_sms, cudaDevAttrMultiProcessorCount},
        std::pair{&args.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin}}) {
    if (cudaError_t error = cudaDeviceGetAttribute(value, attribute, device);
        error != cudaSuccess) {
      return error;
    }
  }
  if (!hasTensorCoreKernel(p)) return launchGenericAttention(args, stream);
  if (!args.decodes_all) {
    if (cudaError_t error = launchPrefillAttention(args, stream); error != cudaSuccess) {
      return error;
    }
  }
  return launchDecodeAttention(args, stream);
}

}  // namespace looptrt
