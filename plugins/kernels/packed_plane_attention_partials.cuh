// Where the decode kernel of packed_plane_attention leaves the sums of splits for their fold.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "packed_plane_attention_forms.cuh"

namespace looptrt {

// Of a row and head, all splits one after the other. Reckoned on the host, for a launch.
struct Partials {
  float* values;    // [partial rows, num_heads, max_splits, head_dim]
  float2* summary;  // [partial rows, num_heads, max_splits]: RowState's top and sum
  bool are_of_every_row;

  explicit Partials(AttentionArgs const& args)
      : values(static_cast<float*>(args.p.workspace)),
        are_of_every_row(args.hasPartialOfEveryRow()) {
    int64_t const count = args.partialRows() * args.p.num_heads * args.max_splits;
    summary = reinterpret_cast<float2*>(values + count * args.p.head_dim);
  }
};

// Place of a partial row's first split.
__device__ __forceinline__ int64_t partialIndex(AttentionArgs const& args, int64_t partial_row,
                                                int head) {
  return (partial_row * args.p.num_heads + head) * args.max_splits;
}

}  // namespace looptrt
