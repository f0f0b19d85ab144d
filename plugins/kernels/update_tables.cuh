// New columns of the block table.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace looptrt {

struct UpdateTablesParams {
  int32_t* block_table;  // [max_slots, num_rows, max_pages]
  int32_t const* slots;  // [num_updates]
  int32_t const* pages;  // [num_updates], all (slot, page) pairs different
  int32_t const* units;  // [num_updates, num_rows]
  int64_t num_updates;
  int32_t max_slots, num_rows, max_pages;
};

// block_table[slots[i], :, pages[i]] = units[i]; an update outside the table is left out.
// Exactness: deterministic, a copy.
// Errors: cudaErrorInvalidValue for an empty table. Never allocates or syncs; capture-safe.
[[nodiscard]] cudaError_t launchUpdateTables(UpdateTablesParams const& p, cudaStream_t stream);

}  // namespace looptrt
