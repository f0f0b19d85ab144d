// Where the keys of a row are cut: a function of positions alone, part of the bits of a result.
//
// Positions are cut into splits of 128 up to 2048, then every range up to the double into eight. A
// split is summed on its own, from zero, in tiles of 64 keys; splits are folded in order. So splits
// may run side by side (decode) or one after the other (prefill) and give the same bits, and 64k
// positions have no more than 56 partial results.
#pragma once

#include <cstdint>

#include "looptrt/paged_kv.cuh"

namespace looptrt {

constexpr int32_t kTileKeys = 64;
constexpr int32_t kFirstSplitBits = 7;
constexpr int32_t kFirstSplit = 1 << kFirstSplitBits;  // keys of the first splits
constexpr int32_t kSplitsARange = 8;                   // of a range up to the double
constexpr int32_t kMaxPositions = 1 << 30;             // keeps position arithmetic inside int32

static_assert(kFirstSplit % kTileKeys == 0, "a tile never crosses a split");

// First position of a split.
LOOPTRT_HOST_DEVICE int32_t splitBegin(int32_t split) {
  if (split < kSplitsARange) return split * kFirstSplit;
  int32_t const doublings = split / kSplitsARange - 1;
  return (kSplitsARange + split % kSplitsARange) << (kFirstSplitBits + doublings);
}

// Split of a position.
LOOPTRT_HOST_DEVICE int32_t splitOf(int32_t position) {
  int32_t first_splits = position >> kFirstSplitBits;
  int32_t doublings = 0;
  while (first_splits >= 2 * kSplitsARange) {
    first_splits >>= 1;
    ++doublings;
  }
  return doublings * kSplitsARange + first_splits;
}

}  // namespace looptrt
