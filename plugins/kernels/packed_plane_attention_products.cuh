// How the prefill kernel of packed_plane_attention multiplies tiles: by warps, on every GPU, or by
// warpgroups, on sm_90a. Both have the arithmetic of packed_plane_attention_tile.cuh, to the bit.
//
// Owns where queries wait; leaves the tiles of K and V to the kernel, which lays them out as Layout
// says.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "looptrt/wgmma.cuh"
#include "packed_plane_attention_tile.cuh"

namespace looptrt {

// A warp by itself, its queries in registers.
template <typename T, int kHeadDim>
class ProductsOfAWarp {
 public:
  static constexpr int kRows = kRowsAWarp;  // of the warps that multiply together
  static constexpr int kBlocksAnSm = kHeadDim == 64 ? 3 : 1;
  static constexpr int kAlignment = 128;  // of a tile, in bytes
  static constexpr int kTileBytes = kTileKeys * TileLayout<kHeadDim>::kRowBytes;
  static constexpr bool kKeepsQueries = false;  // in shared memory
  static constexpr int kWarpBytes = kRowsAWarp * TileLayout<kHeadDim>::kRowBytes;
  using Layout = TileLayout<kHeadDim>;

  // memory: the block's, shared, kWarpBytes a warp, needed until takeQueries() has returned.
  __device__ __forceinline__ ProductsOfAWarp(char* memory, int warp)
      : own_(sharedAddress(memory) + warp * kWarpBytes) {}

  // Where a chunk of the warp's query rows is to arrive before takeQueries().
  __device__ __forceinline__ uint32_t placeOfQuery(int row, int chunk) const {
    return own_ + Layout::byteOffset(row, chunk);
  }
  __device__ __forceinline__ void takeQueries() {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      loadMatrices(queries_[step], own_ + Layout::byteOffset(lane % 16, 2 * step + lane / 16));
    }
  }

  // Between the end of copies or stores to a tile and the barrier before its products.
  __device__ __forceinline__ void showTile() const {}
  // scores = Q K, known after finishScores().
  __device__ __forceinline__ void startScores(float (&scores)[8][4], uint32_t keys) const {
    multiplyKeys<T, kHeadDim>(
        scores,
        [&](int step, uint32_t (&a)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = queries_[step][i];
        },
        keys);
  }
  __device__ __forceinline__ void finishScores(float (&)[8][4]) const {}
  __device__ __forceinline__ void addValues(float (&sums)[kHeadDim / 8][4],
                                            float const (&weights)[8][4], uint32_t values) const {
    looptrt::addValues<T, kHeadDim>(sums, weights, values);
  }

 private:
  uint32_t own_;
  uint32_t queries_[kHeadDim / 16][4];
};

// Four warps together. Queries stay in shared memory, where the tensor cores read them.
template <typename T, int kHeadDim>
class ProductsOfAGroup {
 public:
  static constexpr int kRows = 4 * kRowsAWarp;
  static constexpr int kBlocksAnSm = 1;
  static constexpr int kAlignment = 1024;
  static constexpr int kTileBytes = SlabTile<kHeadDim, kTileKeys>::kBytes;
  static constexpr bool kKeepsQueries = true;
  static constexpr int kWarpBytes = SlabTile<kHeadDim, kRows>::kBytes / 4;
  using Layout = SlabTile<kHeadDim, kTileKeys>;

  // memory: the block's, shared, kWarpBytes a warp.
  __device__ __forceinline__ ProductsOfAGroup(char* memory, int warp)
      : queries_(sharedAddress(memory) + warp / 4 * 4 * kWarpBytes), first_row_(warp % 4 * 16) {}

  __device__ __forceinline__ uint32_t placeOfQuery(int row, int chunk) const {
    return queries_ + Queries::byteOffset(first_row_ + row, chunk);
  }
  __device__ __forceinline__ void takeQueries() const {}  // they stay

  __device__ __forceinline__ void showTile() const { showToProducts(); }
  __device__ __forceinline__ void startScores(float (&scores)[8][4], uint32_t keys) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = 0.0f;
    }
    holdHere(scores);
    fenceProducts();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      startMultiplyAdd64(scores, Queries::columnsOf(queries_, 16 * step),
                         Layout::columnsOf(keys, 16 * step), T{});
    }
    commitProducts();
  }
  __device__ __forceinline__ void finishScores(float (&scores)[8][4]) const {
    waitForProducts();
    holdHere(scores);
  }
  // Waits for the end: nvcc 13.0 does not keep other values out of a left operand's registers until
  // a wait in the loop's next turn (wrong sums, measured).
  __device__ __forceinline__ void addValues(float (&sums)[kHeadDim / 8][4],
                                            float const (&weights)[8][4], uint32_t values) const {
    uint32_t packed[kTileKeys / 16][4];
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) packWeights<T>(weights, step, packed[step]);
    holdHere(packed);
    holdHere(sums);
    fenceProducts();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      uint64_t const first = Layout::rowsOf(values, 16 * step, 0);
      if constexpr (kHeadDim == 96) {
        startMultiplyAddTransposed96(sums, packed[step], first, T{});
      } else {
        startMultiplyAddTransposed64<0>(sums, packed[step], first, T{});
      }
      if constexpr (kHeadDim == 128) {
        startMultiplyAddTransposed64<8>(sums, packed[step], Layout::rowsOf(values, 16 * step, 64),
                                        T{});
      }
    }
    commitProducts();
    waitForProducts();
    holdHere(sums);
  }

 private:
  using Queries = SlabTile<kHeadDim, kRows>;

  uint32_t queries_;  // the group's
  int first_row_;     // of the warp, in the group
};

}  // namespace looptrt
