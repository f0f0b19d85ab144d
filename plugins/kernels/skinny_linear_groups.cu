#include <cuda_runtime.h>

#include <algorithm>

#include "looptrt/cluster.cuh"
#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/mbarrier.cuh"
#include "looptrt/mma.cuh"
#include "looptrt/vec.cuh"
#include "looptrt/wgmma.cuh"
#include "skinny_linear_groups.cuh"

namespace looptrt {
namespace {

// The inputs of a sum are cut into kClusterBlocks ranges of whole pieces, a block of a cluster
// each; a range is summed from its first input on, 16 at a time; then the ranges' sums are added in
// order. These constants fix bits.
constexpr int kClusterBlocks = 4;
constexpr int kPiece = 64;

constexpr int kTile = 64;                       // outputs of a cluster at a time
constexpr int kShare = kTile / kClusterBlocks;  // of which a block adds up the ranges' sums

// Threads of a block: a warpgroup multiplies, two warps copy weights, two x.
constexpr int kMultiplyThreads = 128;
constexpr int kCopyThreads = 64;
constexpr int kBlock = kMultiplyThreads + 2 * kCopyThreads;
static_assert(kShare == kTile / (kMultiplyThreads / 32));  // what a warp has of a tile

constexpr int kAlignment = 1024;  // of a SlabTile
// Of shared memory, for a block that leaves room for the next product's: 228 KiB are a
// multiprocessor's, 1 of each block's the system's.
constexpr int kMostBytes = 113 * 1024;
constexpr size_t kLeastShared = 1024;  // of the kernel's variables

using WeightTile = SlabTile<kPiece, kTile>;

template <int kRows>
struct Sizes {
  using InputTile = SlabTile<kPiece, kRows>;
  static constexpr int kStageBytes = WeightTile::kBytes + InputTile::kBytes;
  static constexpr int kSumVecs = kRows / 2 + 4;  // of an output: rows by twos, and 8 banks more
  static constexpr int kSumBytes = 2 * kClusterBlocks * kShare * kSumVecs * 8;
  static constexpr int kStages = (kMostBytes - kAlignment - kSumBytes - 256) / kStageBytes;
  static constexpr int kRingBytes = kStages * kStageBytes + kAlignment;
  static_assert(kStages >= 4);
};

// A cluster has every num_clusters-th tile.
struct GroupLinearArgs {
  SkinnyLinearParams p;
  int32_t tiles, pieces;
  int32_t pieces_a_block;
  int32_t num_clusters;
};

// The stages of a ring in turn, and how often it has been gone round, as a barrier's parity.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void goOn() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What copiers and the multiplying group of a block share.
template <int kStages>
struct Ring {
  uint32_t stages;
  uint32_t full;   // barriers: a stage's copies are there
  uint32_t empty;  // it has been multiplied
};

// Copies rows of pieces to their place in the ring's stages, kStageRows a stage; zeros for rows
// past num_rows and inputs past their end.
template <typename T, int kRows, int kStageRows, bool kIsWeight>
__device__ __forceinline__ void copyPieces(GroupLinearArgs const& args,
                                           Ring<Sizes<kRows>::kStages> const& ring, T const* matrix,
                                           int num_rows) {
  using Tile = SlabTile<kPiece, kStageRows>;
  constexpr int kRowsACopy = kCopyThreads / Tile::kChunks;
  static_assert(kRowsACopy == 8);  // which keeps a thread's chunks exchanged alike
  int const thread = threadIdx.x % kCopyThreads;
  int const row = thread / Tile::kChunks;
  int const chunk = thread % Tile::kChunks;
  int const rank = blockIdx.x % kClusterBlocks;
  int const first_piece = min(rank * args.pieces_a_block, args.pieces);
  int const end_piece = min(first_piece + args.pieces_a_block, args.pieces);
  int const inputs = args.p.inputs;
  uint32_t const place =
      ring.stages + (kIsWeight ? 0 : WeightTile::kBytes) + Tile::byteOffset(row, chunk);
  int64_t const step = int64_t{kRowsACopy} * inputs / 8;  // in chunks

  Turn<Sizes<kRows>::kStages> turn;
  bool is_first_round = true;
  for (int tile = blockIdx.x / kClusterBlocks; tile < args.tiles; tile += args.num_clusters) {
    int const first_row = (kIsWeight ? tile * kTile : 0) + row;
    T const* const start = matrix + int64_t{first_row} * inputs;
    for (int piece = first_piece; piece < end_piece; ++piece) {
      if (!is_first_round) waitForPhase(ring.empty + turn.stage * 8, turn.parity ^ 1);
      int const input = piece * kPiece + chunk * 8;
      auto const* const from = reinterpret_cast<uint4 const*>(start + input);
      uint32_t const to = place + turn.stage * Sizes<kRows>::kStageBytes;
#pragma unroll
      for (int i = 0; i < kStageRows / kRowsACopy; ++i) {
        bool const is_there = input < inputs && first_row + i * kRowsACopy < num_rows;
        copyChunkOrZero(to + i * kRowsACopy * kPiece * 2, is_there ? from + i * step : nullptr, 0);
      }
      arriveWithCopies(ring.full + turn.stage * 8);
      turn.goOn();
      if (turn.stage == 0) is_first_round = false;
    }
  }
  waitForCopies();
}

// Adds up and stores the block's share of a tile.
template <typename T, int kRows>
__device__ __forceinline__ void foldShare(
    SkinnyLinearParams const& p,
    Vec<float, 2> const (&sums)[kClusterBlocks][kShare][Sizes<kRows>::kSumVecs], int first_output) {
  constexpr int kFold = 4;  // outputs of a thread
  for (int item = threadIdx.x; item < p.num_rows * (kShare / kFold); item += kMultiplyThreads) {
    int const row = item / (kShare / kFold);
    int const part = item % (kShare / kFold) * kFold;
    float totals[kFold];
#pragma unroll
    for (int i = 0; i < kFold; ++i) {
      totals[i] = sums[0][part + i][row / 2][row % 2];
#pragma unroll
      for (int block = 1; block < kClusterBlocks; ++block) {
        totals[i] = addRn(totals[i], sums[block][part + i][row / 2][row % 2]);
      }
    }
    int const output = first_output + part;
    T* const to = static_cast<T*>(p.y) + int64_t{row} * p.outputs + output;
    if (p.outputs % kFold == 0 && output < p.outputs) {
      *reinterpret_cast<uint2*>(to) = make_uint2(Packed<T>::roundTo(totals[0], totals[1]),
                                                 Packed<T>::roundTo(totals[2], totals[3]));
      continue;
    }
#pragma unroll
    for (int i = 0; i < kFold; ++i) {
      if (output + i < p.outputs) to[i] = roundTo<T>(totals[i]);
    }
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void multiplyPieces(
    GroupLinearArgs const& args, Ring<Sizes<kRows>::kStages> const& ring,
    Vec<float, 2> (&sums)[2][kClusterBlocks][kShare][Sizes<kRows>::kSumVecs], uint32_t summed) {
  using InputTile = typename Sizes<kRows>::InputTile;
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  int const rank = blockIdx.x % kClusterBlocks;
  int const num_pieces = max(0, min(args.pieces_a_block, args.pieces - rank * args.pieces_a_block));
  Turn<Sizes<kRows>::kStages> turn;
  Turn<2> buffer;  // of sums
  uint32_t parity = 0;
  for (int tile = blockIdx.x / kClusterBlocks; tile < args.tiles; tile += args.num_clusters) {
    float d[kRows / 8][4];
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[j][i] = 0.0f;
    }
    int last_stage = 0;
    for (int piece = 0; piece < num_pieces; ++piece) {
      uint32_t const weights = ring.stages + turn.stage * Sizes<kRows>::kStageBytes;
      uint32_t const x = weights + WeightTile::kBytes;
      waitForPhase(ring.full + turn.stage * 8, turn.parity);
      showToProducts();
      holdHere(d);
      fenceProducts();
#pragma unroll
      for (int step = 0; step < kPiece / 16; ++step) {
        startMultiplyAdd(d, WeightTile::columnsOf(weights, 16 * step),
                         InputTile::columnsOf(x, 16 * step), T{});
      }
      commitProducts();
      waitForProductsBut<1>();
      holdHere(d);
      if (piece > 0 && lane == 0) arrive(ring.empty + last_stage * 8);
      last_stage = turn.stage;
      turn.goOn();
    }
    waitForProductsBut<0>();
    holdHere(d);
    if (num_pieces > 0 && lane == 0) arrive(ring.empty + last_stage * 8);

    // A warp's outputs are the share of one block. Its place for them is free: that block's sums
    // of the tile before were taken above, after it had folded the one before that.
    uint32_t const to = inBlock(sharedAddress(&sums[buffer.stage][rank][lane / 4][lane % 4]), warp);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      storeInBlock(to + j * 32, d[j][0], d[j][1]);
      storeInBlock(to + j * 32 + 8 * Sizes<kRows>::kSumVecs * 8, d[j][2], d[j][3]);
    }
    __syncwarp();
    if (lane == 0) arriveInCluster(inBlock(summed, warp));
    waitForPhaseInCluster(summed, parity);
    foldShare<T, kRows>(args.p, sums[buffer.stage], tile * kTile + rank * kShare);
    syncWarps<kMultiplyThreads>();  // all have folded before one leaves the next sums
    parity ^= 1;
    buffer.goOn();
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void linearByGroups(GroupLinearArgs const& args) {
  constexpr int kStages = Sizes<kRows>::kStages;
  extern __shared__ uint4 memory[];
  __shared__ Vec<float, 2> sums[2][kClusterBlocks][kShare][Sizes<kRows>::kSumVecs];
  __shared__ uint64_t full[kStages];
  __shared__ uint64_t empty[kStages];
  __shared__ uint64_t summed[1];
  letNextStart();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      makeBarrier(sharedAddress(&full[i]), 2 * kCopyThreads);
      makeBarrier(sharedAddress(&empty[i]), kMultiplyThreads / 32);
    }
    makeBarrier(sharedAddress(summed), kClusterBlocks);
    showBarriers();
  }
  __syncthreads();
  arriveAtCluster();
  uint32_t const base = (sharedAddress(memory) + kAlignment - 1) / kAlignment * kAlignment;
  Ring<kStages> const ring{base, sharedAddress(full), sharedAddress(empty)};
  SkinnyLinearParams const& p = args.p;
  if (threadIdx.x < kMultiplyThreads) {
    waitForInputs();   // also for the last reader of y
    waitForCluster();  // its barriers are there
    multiplyPieces<T, kRows>(args, ring, sums, sharedAddress(summed));
  } else if (threadIdx.x < kMultiplyThreads + kCopyThreads) {
    copyPieces<T, kRows, kTile, true>(args, ring, static_cast<T const*>(p.weight), p.outputs);
    waitForCluster();
  } else {
    waitForInputs();
    copyPieces<T, kRows, kRows, false>(args, ring, static_cast<T const*>(p.x), p.num_rows);
    waitForCluster();
  }
}

// Grid: num_clusters clusters of kClusterBlocks blocks.
template <typename T, int kRows>
__global__ void __launch_bounds__(kBlock, 2) groupLinearKernel(GroupLinearArgs const args) {
#ifdef LOOPTRT_HAS_WARPGROUPS
  linearByGroups<T, kRows>(args);
#else
  __trap();  // canLinearByGroups says no
#endif
}

template <typename T, int kRows>
cudaError_t launchRows(GroupLinearArgs args, cudaStream_t stream) {
  auto* const kernel = groupLinearKernel<T, kRows>;
  constexpr int kBytes = Sizes<kRows>::kRingBytes;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  if (cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      error != cudaSuccess) {
    return error;
  }
  // Of clusters that the GPU has room for, half: the rest is the next product's.
  int most = 0;
  if (cudaError_t error = mostClusters(kernel, kClusterBlocks, kBlock, kBytes, most);
      error != cudaSuccess) {
    return error;
  }
  int const rounds = ceilDiv(args.tiles, std::max(most / 2, 1));
  args.num_clusters = ceilDiv(args.tiles, rounds);
  return launchKernel(kernel, dim3(args.num_clusters * kClusterBlocks), kBlock, stream, args,
                      kBytes, Start::kOverlapping, kClusterBlocks);
}

}  // namespace

cudaError_t canLinearByGroups(bool& can) {
  return hasWarpgroups(groupLinearKernel<__nv_bfloat16, 16>, kLeastShared, can);
}

cudaError_t launchSkinnyLinearByGroups(SkinnyLinearParams const& p, cudaStream_t stream) {
  GroupLinearArgs args{};
  args.p = p;
  args.tiles = ceilDiv(p.outputs, kTile);
  args.pieces = ceilDiv(p.inputs, kPiece);
  args.pieces_a_block = ceilDiv(args.pieces, kClusterBlocks);
  return dispatchDType(p.dtype, [&](auto tag) -> cudaError_t {
    using T = typename decltype(tag)::Type;
    if constexpr (sizeof(T) == 2) {
      if (p.num_rows <= 8) return launchRows<T, 8>(args, stream);
      if (p.num_rows <= 16) return launchRows<T, 16>(args, stream);
      if (p.num_rows <= 32) return launchRows<T, 32>(args, stream);
      if (p.num_rows <= 64) return launchRows<T, 64>(args, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace looptrt
