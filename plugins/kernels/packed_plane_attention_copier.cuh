// How the decode kernel of packed_plane_attention brings K and V into shared memory.
//
// Owns which tiles of a block's items are copied when, and how a block's warps share them; leaves
// what items there are to packed_plane_attention_items.cuh and where keys lie to _source.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_items.cuh"
#include "packed_plane_attention_partials.cuh"
#include "packed_plane_attention_source.cuh"
#include "packed_plane_attention_tile.cuh"

namespace looptrt {

constexpr int kLanes = 32;
constexpr int kWarps = 4;  // share a tile: 16 of its keys each, then a quarter of the channels
constexpr int kWarpKeys = kTileKeys / kWarps;
constexpr int kStages = 2;                 // tiles of K and V in shared memory
constexpr int kQueuedItems = kStages + 2;  // found, but not yet summed

static_assert(kWarpKeys == 16, "a warp multiplies 16 keys at a time");
static_assert(kFirstSplit % (2 * kTileKeys) == 0, "keys are looked up in pairs of tiles");

template <int kHeadDim>
constexpr int kStageBytes = 2 * kTileKeys * TileLayout<kHeadDim>::kRowBytes;

// What the kernel is launched with.
struct DecodeArgs {
  AttentionArgs call;
  Partials partials;
  TileDividers tiles;
};

// What a warp keeps for itself in shared memory.
struct WarpShared {
  KeySource sources[2][kWarpKeys];  // of its keys in two tiles
  Item items[kQueuedItems];
};

__device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
__device__ __forceinline__ int warp() { return threadIdx.x / kLanes; }

// A warp's share in copying tiles of K and V into a ring of stages, ahead of their sums and across
// the block's items. A warp copies the keys that it multiplies, so that it needs no other warp
// before their V.
template <typename T, int kHeadDim>
class TileCopier {
 public:
  __device__ __forceinline__ TileCopier(DecodeArgs const& args, uint32_t stages, WarpShared& shared)
      : args_(args.call), pool_(args.call), shared_(shared), walk_(args.call, args.tiles) {
    findItem();
    uint32_t const keys = stages + warp() * kWarpKeys * Layout::kRowBytes;
#pragma unroll
    for (int i = 0; i < kHalfCopies; ++i) {
      to_[i] = keys + Layout::byteOffset(chunk(i) / kChunks, chunk(i) % kChunks);
    }
  }

  // Starts to copy the block's next tile, if there is one. Commits a group in any case.
  __device__ __forceinline__ void copyNext() {
    if (tiles_found_ > 0 || findSources()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        KeySource from[kHalfCopies];  // asked for before the first is used
#pragma unroll
        for (int i = 0; i < kHalfCopies; ++i) {
          from[i] = shared_.sources[part_][8 * half + chunk(i) / kChunks];
        }
#pragma unroll
        for (int i = 0; i < kHalfCopies; ++i) {
          uint32_t const to =
              to_[i] + 8 * half * Layout::kRowBytes + stage_ * kStageBytes<kHeadDim>;
          copyChunkOrZero(to, from[i].key, chunk(i) % kChunks);
          copyChunkOrZero(to + kStageBytes<kHeadDim> / 2, from[i].value, chunk(i) % kChunks);
        }
      }
      if (++stage_ == kStages) stage_ = 0;
      --tiles_found_;
      if (part_++ == 0) findNext();
    }
    commitCopies();
  }

  // Whether the tile that copyNext would copy may hold keys of this call, of a row of qkv.
  __device__ __forceinline__ bool nextHasNewKeys() const {
    return tiles_found_ == 0 && first_key_ >= 0 &&
           first_key_ + 2 * kTileKeys > item().lookup.first_new;
  }

  // Whether the block has another item, whose tiles follow those of the last one.
  __device__ __forceinline__ bool hasItem() const { return num_taken_ < num_items_; }
  // Takes it; it stays where it is until the next one is taken.
  __device__ __forceinline__ Item const& takeItem() {
    return shared_.items[num_taken_++ % kQueuedItems];
  }

 private:
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kChunks = Layout::kChunks;
  // A lane's chunks of 8 of the warp's keys; those of the other 8 have the same places 8 rows on.
  static constexpr int kHalfCopies = 8 * kChunks / kLanes;
  static_assert(8 * kChunks % kLanes == 0 && kWarpKeys == 16);

  __device__ __forceinline__ static int chunk(int i) { return lane() + i * kLanes; }
  // The lane's key of a pair of tiles.
  __device__ __forceinline__ int key() const {
    return first_key_ + lane() / kWarpKeys * kTileKeys + warp() * kWarpKeys + lane() % kWarpKeys;
  }

  // The item whose tiles are being copied.
  __device__ __forceinline__ Item const& item() const {
    return shared_.items[(num_items_ - 1) % kQueuedItems];
  }

  // Takes the item where the walk stands, asks for entries of its first two tiles and only then
  // writes it down.
  __device__ __forceinline__ void findItem() {
    Item found;
    first_key_ = -1;
    if (!walk_.find(found)) return;
    first_key_ = found.first_key;
    entry_ = entryOf(args_, found.lookup, key(), found.last_key);
    if (lane() == 0) shared_.items[num_items_ % kQueuedItems] = found;
    __syncwarp();
    ++num_items_;
  }

  // Asks for the entries of the two tiles after those that were found last.
  __device__ __forceinline__ void findNext() {
    first_key_ += 2 * kTileKeys;
    if (first_key_ <= item().last_key) {
      entry_ = entryOf(args_, item().lookup, key(), item().last_key);
    } else {
      walk_.advance();
      findItem();
    }
  }

  // Finds the sources of the next two tiles.
  __device__ __forceinline__ bool findSources() {
    if (first_key_ < 0) return false;
    __syncwarp();  // the last ones have been read
    shared_.sources[lane() / kWarpKeys][lane() % kWarpKeys] =
        sourceOf(args_, pool_, item().lookup, entry_, key());
    __syncwarp();
    part_ = 0;
    tiles_found_ = first_key_ + kTileKeys <= item().last_key ? 2 : 1;
    return true;
  }

  AttentionArgs const& args_;
  KvPool<T> const pool_;
  WarpShared& shared_;
  ItemWalk walk_;      // as far as entries have been asked for
  int32_t first_key_;  // of the two tiles whose entries have been asked for; -1: of none
  int32_t entry_;      // of the lane's key among them
  uint32_t to_[kHalfCopies];
  int32_t part_;             // of the two tiles that were found last, the next to copy
  int32_t tiles_found_ = 0;  // of them, not yet copied
  int32_t stage_ = 0;
  uint32_t num_items_ = 0, num_taken_ = 0;
};

}  // namespace looptrt
