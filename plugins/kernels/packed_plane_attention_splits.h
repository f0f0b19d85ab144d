// Where the keys of a row are cut: a function of positions alone, part of the bits of a result.
//
// Positions are cut into splits, eight of 128, eight of 256, eight of 512 and so on. A split is
// summed on its own, from zero, in tiles of 64 keys; splits are folded in order. So splits may run
// side by side (decode) or one after the other (prefill) and give the same bits, and 64k positions
// have no more than 49 partial results.
#pragma once

#include <cstdint>

#include "looptrt/paged_kv.cuh"

namespace looptrt {

constexpr int32_t kTileKeys = 64;
constexpr int32_t kFirstSplitBits = 7;
constexpr int32_t kFirstSplit = 1 << kFirstSplitBits;  // keys of the first splits
constexpr int32_t kSplitsALength = 8;                  // splits before their length doubles
constexpr int32_t kMaxPositions = 1 << 30;             // keeps position arithmetic inside int32

static_assert(kFirstSplit % kTileKeys == 0, "a tile never crosses a split");

// First position of a split.
LOOPTRT_HOST_DEVICE int32_t splitBegin(int32_t split) {
  int32_t const level = split / kSplitsALength;
  int32_t const within = split % kSplitsALength;
  return kFirstSplit * (kSplitsALength * ((1 << level) - 1) + (within << level));
}

// Split of a position.
LOOPTRT_HOST_DEVICE int32_t splitOf(int32_t position) {
  int32_t blocks = position / (kFirstSplit * kSplitsALength) + 1;
  int32_t level = 0;
  while (blocks > 1) {
    blocks >>= 1;
    ++level;
  }
  int32_t const within =
      (position - splitBegin(level * kSplitsALength)) >> (kFirstSplitBits + level);
  return level * kSplitsALength + within;
}

}  // namespace looptrt
