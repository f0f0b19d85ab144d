// What the kernels of packed_plane_attention know of a call, and which rows each of them takes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "looptrt/dispatch.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/paged_kv.cuh"
#include "packed_plane_attention.cuh"
#include "packed_plane_attention_splits.h"

namespace looptrt {

struct AttentionArgs {
  PackedPlaneAttentionParams p;
  LayerSlot layer;
  PageDivider pages;
  int32_t element_bytes;  // of dtype
  int32_t max_positions;  // of a sequence
  int32_t max_splits;     // of a row
  int32_t group;          // query heads of a kv head
  int32_t few_rows;       // most rows of a sequence that is decoded, unless all are
  int32_t rows_a_tile;    // rows of a sequence in a decode tile, at least 1
  int32_t heads_a_tile;   // heads of a group in a decode tile
  int32_t head_tiles;     // decode tiles of a group
  float scale;            // with log2(e) in it
  bool decodes_all;       // the decode kernel takes sequences with many rows too
  int32_t num_sms;
  int32_t shared_bytes;  // a block may have

  // Partial results have a place for every row, or, where that is less, for few_rows of a sequence.
  __host__ __device__ int64_t partialRows() const {
    int64_t const most = int64_t{p.num_sequences} * few_rows;
    return p.num_rows <= most ? p.num_rows : most;
  }
  __host__ __device__ bool hasPartialOfEveryRow() const { return partialRows() == p.num_rows; }
};

// All rows, one warp a row and head; stores K and V first. Any dtype, head_dim up to 256.
[[nodiscard]] cudaError_t launchGenericAttention(AttentionArgs const& args, cudaStream_t stream);
// Sequences with few rows, their splits side by side, then launchSplitFold.
[[nodiscard]] cudaError_t launchDecodeAttention(AttentionArgs const& args, cudaStream_t stream);
// Folds the splits that the decode kernel has left side by side, row by row.
[[nodiscard]] cudaError_t launchSplitFold(AttentionArgs const& args, cudaStream_t stream);
// Sequences with more rows.
[[nodiscard]] cudaError_t launchPrefillAttention(AttentionArgs const& args, cudaStream_t stream);

constexpr int kMaxHeadDim = 256;
constexpr int kTilePairs = 8;  // (row, head) pairs of a decode tile, half of an mma's rows

// Calls f(TypeTag<T>, std::integral_constant<int, head_dim>) where the tensor-core kernels take
// both. Returns f's result, or cudaErrorInvalidValue.
template <typename F>
cudaError_t dispatchTensorCores(PackedPlaneAttentionParams const& p, F&& f) {
  return dispatchDType(p.dtype, [&](auto tag) -> cudaError_t {
    if constexpr (sizeof(typename decltype(tag)::Type) == 2) {
      if (p.head_dim == 64) return f(tag, std::integral_constant<int, 64>{});
      if (p.head_dim == 96) return f(tag, std::integral_constant<int, 96>{});
      if (p.head_dim == 128) return f(tag, std::integral_constant<int, 128>{});
    }
    return cudaErrorInvalidValue;
  });
}

// Lets a kernel have so many bytes of shared memory at a launch. All of these kernels ask for the
// same carveout: a multiprocessor must be idle to divide its memory anew, and takes fewer blocks
// until it is.
template <typename Kernel>
cudaError_t prepareShared(Kernel* kernel, int bytes) {
  if (bytes > 0) {
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

#ifdef __CUDACC__

struct RowRange {
  int32_t begin, end;
};

// Rows between two of cu_seqlens; never outside the call's.
__device__ __forceinline__ RowRange rowsBetween(AttentionArgs const& args, int32_t from,
                                                int32_t to) {
  int32_t const num_rows = static_cast<int32_t>(args.p.num_rows);
  int32_t const begin = min(max(from, 0), num_rows);
  return {begin, min(max(to, begin), num_rows)};
}

// A sequence's rows.
__device__ __forceinline__ RowRange rowsOf(AttentionArgs const& args, int32_t sequence) {
  return rowsBetween(args, args.p.cu_seqlens[sequence], args.p.cu_seqlens[sequence + 1]);
}

// Sequence of a row, by bisection; num_sequences for a row of none.
__device__ __forceinline__ int32_t sequenceOf(AttentionArgs const& args, int32_t row) {
  int32_t low = 0;  // the first sequence that ends after row is in low..high
  int32_t high = args.p.num_sequences;
  while (low < high) {
    int32_t const middle = low + (high - low) / 2;
    if (args.p.cu_seqlens[middle + 1] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A slot's unit ids in a plane, page by page; null if the slot or its table row is out of range.
__device__ __forceinline__ int32_t const* tableAt(AttentionArgs const& args, int32_t slot,
                                                  int32_t plane) {
  int64_t const row = int64_t{args.p.row} + plane;
  if (slot < 0 || slot >= args.p.max_slots || row < 0 || row >= args.p.table_rows) return nullptr;
  return args.p.block_table + (int64_t{slot} * args.p.table_rows + row) * args.p.max_pages;
}

// A sequence's.
__device__ __forceinline__ int32_t const* tableOf(AttentionArgs const& args, int32_t sequence) {
  return tableAt(args, args.p.seq_slots[sequence], args.p.plane[0]);
}

__device__ __forceinline__ bool isPosition(AttentionArgs const& args, int32_t position) {
  return position >= 0 && position < args.max_positions;
}

// A position inside the table, for what must not leave it.
__device__ __forceinline__ int32_t clampPosition(AttentionArgs const& args, int32_t position) {
  return min(max(position, 0), args.max_positions - 1);
}

__device__ __forceinline__ bool hasFewRows(AttentionArgs const& args, int32_t num_rows) {
  return args.decodes_all || num_rows <= args.few_rows;
}

// Offset of a position's K in the pool, in elements; -1 where its unit is null.
__device__ __forceinline__ int64_t kvOffset(AttentionArgs const& args, int32_t const* table,
                                            int64_t num_units, int32_t position, int32_t kv_head) {
  int32_t const unit = unitOf(table, args.pages.page(position), num_units);
  return unit == 0 ? -1 : args.layer.offset(unit, args.pages.token(position), kv_head);
}

// Elements of a row of qkv, and where its K starts; V follows after num_kv_heads * head_dim.
__device__ __forceinline__ int64_t qkvWidth(AttentionArgs const& args) {
  return int64_t{args.p.num_heads + 2 * args.p.num_kv_heads} * args.p.head_dim;
}

__device__ __forceinline__ int64_t newKeyOffset(AttentionArgs const& args, int32_t row,
                                                int32_t kv_head) {
  return row * qkvWidth(args) + int64_t{args.p.num_heads + kv_head} * args.p.head_dim;
}

#endif

}  // namespace looptrt
