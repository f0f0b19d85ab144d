// Copies of token ranges between KV units.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace looptrt {

struct PlaneCopyParams {
  int64_t const* kv_pool;      // [2] on the device: address of unit 0, number of units
  int32_t const* src_units;    // [num_copies]
  int32_t const* dst_units;    // [num_copies], all (unit, token) pairs written once
  int32_t const* token_begin;  // [num_copies] first token index of the page
  int32_t const* token_end;    // [num_copies] one past the last
  void* workspace;             // planeCopyWorkspaceBytes(p) bytes
  int64_t num_copies;
  int32_t unit_slots, page_size;
  int32_t token_bytes;  // of one token in K or V of a slot: num_kv_heads * head_dim * element size
};

size_t planeCopyWorkspaceBytes(PlaneCopyParams const& p);

// Copies K and V of all layer slots; all sources are read before a destination is written. A
// copy from or to the null unit or outside the pool, and tokens outside the page, are left out.
// Exactness: deterministic, a copy.
// Errors: cudaErrorInvalidValue for empty units or token_bytes not a multiple of 4.
// Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchPlaneCopy(PlaneCopyParams const& p, cudaStream_t stream);

}  // namespace looptrt
