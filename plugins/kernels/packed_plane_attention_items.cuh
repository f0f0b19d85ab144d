// How the decode kernel of packed_plane_attention divides its work: items, and who takes which.
//
// An item is one split of one decode tile: up to kTilePairs (row, head) pairs of a sequence that
// share a kv head. Owns the order of items and their round through the blocks; both change no bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "looptrt/divider.cuh"
#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_source.cuh"

namespace looptrt {

constexpr int kSequencesARound = 32;  // one a lane

// What a walk divides by.
struct TileDividers {
  Divider heads;  // decode tiles that differ in heads alone
  Divider group;  // of them, those of a kv head
  Divider rows;   // rows of a decode tile

  explicit TileDividers(AttentionArgs const& args)
      : heads(args.p.num_kv_heads * args.head_tiles),
        group(args.head_tiles),
        rows(args.rows_a_tile) {}
};

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
  // Stands at the block's first item.
  __device__ __forceinline__ ItemWalk(AttentionArgs const& args, TileDividers const& tiles)
      : args_(args), tiles_(tiles) {
    goTo(blockIdx.x);
    planRound();
  }

  // The item where the walk stands, or the next one that there is, the same in all lanes. Whether
  // there is one.
  __device__ __forceinline__ bool find(Item& item) {
    while (true) {
      while (unit_ - begin_ >= num_units_) {
        base_ += kSequencesARound;
        if (base_ >= args_.p.num_sequences) return false;
        begin_ += num_units_;
        planRound();
      }
      item = itemHere();
      if (item.first_key <= item.last_key) return true;
      advance();
    }
  }

  // Back and forth through the blocks: items become shorter towards a sequence's first split, so
  // the block that took a turn's longest takes the shortest of the next one.
  __device__ __forceinline__ void advance() {
    int const step = turn_ % 2 == 0 ? 2 * (gridDim.x - blockIdx.x) - 1 : 2 * blockIdx.x + 1;
    goTo(unit_ * tiles_.heads.divisor() + head_ + step);
    ++turn_;
  }

 private:
  // A lane's sequence.
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

  // Index of an item among those of all rounds: heads run fastest, so that blocks side by side read
  // neighbouring memory.
  __device__ __forceinline__ void goTo(int index) {
    unit_ = tiles_.heads.quotient(index);
    head_ = index - unit_ * tiles_.heads.divisor();
  }

  // Looks up the round's sequences; lanes without one look the last one up.
  __device__ __forceinline__ void planRound() {
    int const num_sequences = min(args_.p.num_sequences - base_, kSequencesARound);
    int const index = base_ + min(lane(), num_sequences - 1);
    int32_t const from = args_.p.cu_seqlens[index];
    int32_t const to = args_.p.cu_seqlens[index + 1];
    int32_t const slot = args_.p.seq_slots[index];
    int32_t const plane = args_.p.plane[0];
    // Of most sequences of a decode step, which have one row.
    int32_t const likely_position =
        args_.p.positions[min(index, static_cast<int>(args_.p.num_rows) - 1)];
    __syncwarp();  // for the compiler: all of it is asked for before the first is waited for
    RowRange const rows = rowsBetween(args_, from, to);
    sequence_.table = tableAt(args_, slot, plane);
    sequence_.rows = rows;
    int const count = rows.end - rows.begin;
    bool const has_tiles = (lane() < num_sequences) & (count > 0) & hasFewRows(args_, count);
    sequence_.last_position = likely_position;
    if (has_tiles && rows.end - 1 != index) {
      sequence_.last_position = args_.p.positions[rows.end - 1];
    }
    sequence_.first_position = sequence_.last_position;
    if (has_tiles && count > 1) sequence_.first_position = args_.p.positions[rows.begin];
    sequence_.num_splits = splitOf(clampPosition(args_, sequence_.last_position)) + 1;
    int const row_tiles = tiles_.rows.quotient(count + args_.rows_a_tile - 1);
    units_ = has_tiles ? row_tiles * sequence_.num_splits : 0;
    units_through_ = units_;
#pragma unroll 1
    for (int step = 1; step < num_sequences; step *= 2) {
      int const before = __shfl_up_sync(0xffffffffu, units_through_, step);
      if (lane() >= step) units_through_ += before;
    }
    num_units_ = valueOf(num_sequences - 1, units_through_);
  }

  // Of a sequence's units, the last split comes first, which is the longest. Without keys where the
  // tile does not reach the split.
  __device__ __forceinline__ Item itemHere() const {
    int const unit = unit_ - begin_;
    int const owner = __ffs(__ballot_sync(0xffffffffu, units_through_ > unit)) - 1;
    auto* const table = reinterpret_cast<int32_t const*>(
        valueOf(owner, reinterpret_cast<uint64_t>(sequence_.table)));
    RowRange const all{valueOf(owner, sequence_.rows.begin), valueOf(owner, sequence_.rows.end)};
    int32_t const first_new = valueOf(owner, sequence_.first_position);
    int32_t const last_new = valueOf(owner, sequence_.last_position);
    int const num_splits = valueOf(owner, sequence_.num_splits);
    int before_split = unit - valueOf(owner, units_through_ - units_);
    int tile = 0;
    if (before_split >= num_splits) {
      tile = before_split / num_splits;
      before_split -= tile * num_splits;
    }
    int const kv_head = tiles_.group.quotient(head_);
    int const head_in_group = (head_ - kv_head * args_.head_tiles) * args_.heads_a_tile;
    Item item;
    item.lookup = {table, all, first_new, last_new, kv_head};
    item.rows.begin = all.begin + tile * args_.rows_a_tile;
    item.rows.end = min(item.rows.begin + args_.rows_a_tile, all.end);
    item.sequence = base_ + owner;
    item.first_head = kv_head * args_.group + head_in_group;
    item.num_heads = min(args_.heads_a_tile, args_.group - head_in_group);
    item.split = num_splits - 1 - before_split;
    item.first_key = splitBegin(item.split);
    int last = last_new;
    if (item.rows.end != all.end) last = args_.p.positions[item.rows.end - 1];
    item.last_key = min(splitBegin(item.split + 1) - 1, clampPosition(args_, last));
    return item;
  }

  AttentionArgs const& args_;
  TileDividers const& tiles_;
  int32_t unit_, head_;  // where the walk stands: a unit of all rounds, a tile of all its heads
  int32_t turn_ = 0;
  int32_t begin_ = 0;      // units before the round
  int32_t num_units_ = 0;  // of the round
  int32_t base_ = 0;       // its first sequence
  Sequence sequence_;
  int32_t units_;          // (row tile, split) pairs of the lane's sequence, if it has one
  int32_t units_through_;  // of all lanes up to this one
};

}  // namespace looptrt
