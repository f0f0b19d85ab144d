// How the decode kernel of packed_plane_attention divides its work: items, and who takes which.
//
// An item is one split of one decode tile: up to kTilePairs (row, head) pairs of a sequence that
// share a kv head. Owns the order of items and their round through the blocks; both change no bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_source.cuh"

namespace looptrt {

constexpr int kSequencesARound = 32;  // one a lane

struct Item {
  KeyLookup lookup;
  RowRange rows;
  int32_t sequence, first_head, num_heads;
  int32_t split;
  int32_t first_key, last_key;  // of the split, no further than the tile's last position

  // (row, head) pairs, heads running fastest.
  __device__ __forceinline__ int count() const { return (rows.end - rows.begin) * num_heads; }
};

// Walks through the items of a block. Whole warps; every warp of a block sees the same items.
class ItemWalk {
 public:
  __device__ __forceinline__ explicit ItemWalk(AttentionArgs const& args)
      : args_(args), heads_(args.p.num_kv_heads * args.head_tiles), next_(blockIdx.x) {
    planRound();
  }

  // Writes the next item (lane 0 does) and returns its first key; -1 after the last.
  __device__ __forceinline__ int32_t next(Item& item) {
    while (true) {
      while (next_ - begin_ >= num_items_) {
        base_ += kSequencesARound;
        if (base_ >= args_.p.num_sequences) return -1;
        begin_ += num_items_;
        planRound();
      }
      int const index = next_ - begin_;
      // Back and forth through the blocks: items become shorter towards a sequence's first split,
      // so the block that took a turn's longest takes the shortest of the next one.
      next_ += turn_ % 2 == 0 ? 2 * (gridDim.x - blockIdx.x) - 1 : 2 * blockIdx.x + 1;
      ++turn_;
      if (int32_t const first_key = findItem(index, item); first_key >= 0) return first_key;
    }
  }

 private:
  // A lane's sequence; without decode tiles, one of no units.
  struct Sequence {
    int32_t const* table;
    RowRange rows;
    int32_t first_position, last_position;  // of its rows
    int32_t num_splits;                     // of its last row
  };

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  template <typename Value>
  __device__ __forceinline__ static Value valueOf(int lane, Value value) {
    return __shfl_sync(0xffffffffu, value, lane);
  }

  // Looks up the round's sequences.
  __device__ __forceinline__ void planRound() {
    int const index = base_ + lane();
    sequence_ = {};
    units_ = 0;
    if (index < args_.p.num_sequences) {
      // Asked for together with cu_seqlens: most sequences of a decode step have one row.
      int32_t const likely_position = index < args_.p.num_rows ? args_.p.positions[index] : 0;
      sequence_.table = tableOf(args_, index);
      RowRange const rows = rowsOf(args_, index);
      sequence_.rows = rows;
      int const count = rows.end - rows.begin;
      if (count > 0 && hasFewRows(args_, count)) {
        int const last_row = rows.end - 1;
        sequence_.last_position = last_row == index ? likely_position : args_.p.positions[last_row];
        sequence_.first_position =
            count == 1 ? sequence_.last_position : args_.p.positions[rows.begin];
        sequence_.num_splits = splitOf(clampPosition(args_, sequence_.last_position)) + 1;
        units_ = (count + args_.rows_a_tile - 1) / args_.rows_a_tile * sequence_.num_splits;
      }
    }
    units_through_ = units_;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int const before = __shfl_up_sync(0xffffffffu, units_through_, step);
      if (lane() >= step) units_through_ += before;
    }
    num_items_ = valueOf(31, units_through_) * heads_;
  }

  // Index in the round to item: heads run fastest, so that blocks side by side read neighbouring
  // memory; then splits, a sequence's last and longest first. -1 for a split that the tile does not
  // reach.
  __device__ __forceinline__ int32_t findItem(int index, Item& item) const {
    int const unit = index / heads_;
    int const head = index - unit * heads_;
    int const owner = __ffs(__ballot_sync(0xffffffffu, units_through_ > unit)) - 1;
    int const num_splits = valueOf(owner, sequence_.num_splits);
    int const within = unit - valueOf(owner, units_through_ - units_);
    int const tile = within / num_splits;
    int const split = num_splits - 1 - (within - tile * num_splits);
    auto* const table = reinterpret_cast<int32_t const*>(
        valueOf(owner, reinterpret_cast<uint64_t>(sequence_.table)));
    RowRange const all{valueOf(owner, sequence_.rows.begin), valueOf(owner, sequence_.rows.end)};
    int32_t const first_new = valueOf(owner, sequence_.first_position);
    int32_t const last_new = valueOf(owner, sequence_.last_position);
    RowRange rows;
    rows.begin = all.begin + tile * args_.rows_a_tile;
    rows.end = min(rows.begin + args_.rows_a_tile, all.end);
    int const last = rows.end == all.end ? last_new : args_.p.positions[rows.end - 1];
    int const first_key = splitBegin(split);
    int const last_key = min(splitBegin(split + 1) - 1, clampPosition(args_, last));
    if (first_key > last_key) return -1;
    if (lane() == 0) {
      int const kv_head = head / args_.head_tiles;
      int const head_in_group = (head - kv_head * args_.head_tiles) * args_.heads_a_tile;
      item.lookup = {table, all, first_new, last_new, kv_head};
      item.rows = rows;
      item.sequence = base_ + owner;
      item.first_head = kv_head * args_.group + head_in_group;
      item.num_heads = min(args_.heads_a_tile, args_.group - head_in_group);
      item.split = split;
      item.first_key = first_key;
      item.last_key = last_key;
    }
    __syncwarp();
    return first_key;
  }

  AttentionArgs const& args_;
  int32_t heads_;  // tiles of a sequence's rows that differ in heads
  int32_t next_;   // index of the block's next item among those of all rounds
  int32_t turn_ = 0;
  int32_t begin_ = 0;      // of the round
  int32_t num_items_ = 0;  // of the round
  int32_t base_ = 0;       // its first sequence
  Sequence sequence_;
  int32_t units_;          // (row tile, split) pairs of the lane's sequence
  int32_t units_through_;  // of all lanes up to this one
};

}  // namespace looptrt
