// KV write and paged attention over one plane's slot, for decode and prefill rows alike.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "looptrt/dtype.h"

namespace looptrt {

struct PackedPlaneAttentionParams {
  void* attended;              // [num_rows, num_heads * head_dim]
  void const* qkv;             // [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], rotated
  int32_t const* positions;    // [num_rows], increasing within a sequence
  int32_t const* cu_seqlens;   // [num_sequences + 1], from 0 to num_rows
  int32_t const* seq_slots;    // [num_sequences]
  int32_t const* block_table;  // [max_slots, table_rows, max_pages] unit ids
  int64_t const* kv_pool;      // [2]: address of unit 0 (aligned to 16 bytes), number of units
  int32_t const* plane;        // [1], added to row
  void* workspace;             // packedPlaneAttentionWorkspaceBytes(p) bytes, any content
  int64_t num_rows;
  int32_t num_sequences, max_slots, table_rows, max_pages;
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t page_size, unit_slots, row, slot;
  float scale;  // above 0
  DType dtype;
};

// From the shapes alone: what lies in device memory may change between replays of a graph.
size_t packedPlaneAttentionWorkspaceBytes(PackedPlaneAttentionParams const& p);

// Stores K and V of the rows, then attends from each row to all tokens up to its own position.
// Exactness: batch_invariant. A row's bits depend on its q and on K and V up to its position: every
// kernel here sums over the same fixed splits and tiles of positions with the same instructions
// (packed_plane_attention_tile.cuh), so batch, neighbours, chunks, page placement and the choice of
// kernel change nothing. float32 and other head dims than 64, 96 and 128 have a kernel of their
// own. Nothing on the device can raise: a token whose unit is null or outside the pool is not
// stored and reads as zeros; a row whose position, slot or table row is out of range gives NaN;
// rows without a sequence are left as they are. K and V that are not finite reach the rows that see
// them. Errors: cudaErrorInvalidValue for heads that do not divide, a head_dim that is no multiple
// of 8 or above 256, a slot outside the unit, a scale not above 0; cudaErrorMisalignedAddress
// unless qkv, attended and workspace are aligned to 16 bytes. Never allocates or syncs;
// capture-safe.
[[nodiscard]] cudaError_t launchPackedPlaneAttention(PackedPlaneAttentionParams const& p,
                                                     cudaStream_t stream);

}  // namespace looptrt
