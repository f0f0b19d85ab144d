#include <cuda_runtime.h>

#include <algorithm>

#include "looptrt/vec.cuh"
#include "packed_plane_attention_copier.cuh"
#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_items.cuh"
#include "packed_plane_attention_partials.cuh"
#include "packed_plane_attention_source.cuh"
#include "packed_plane_attention_tile.cuh"

namespace looptrt {
namespace {

constexpr int kBlock = kWarps * kLanes;
constexpr int kMaxEarlyTiles = 128;  // of a call that may start before the last kernel's end

// As many blocks of a multiprocessor as its shared memory and registers hold.
template <int kHeadDim>
constexpr int kBlocksAnSm = kHeadDim == 128 ? 3 : 4;

// One (row, head) pair of a tile.
struct Pair {
  int32_t row, head;
};

template <typename T>
__device__ __forceinline__ uint32_t twoAt(T const* from) {
  return *reinterpret_cast<uint32_t const*>(from);
}

// A warp's share in the sums of tiles: the scores of its 16 keys, the weights of all of the tile's
// keys (every warp makes them all, the same bits), the weighted sums of its channels. One barrier
// a tile: scores and V of all warps are there, and the tile before it has been summed by all, so
// that its stage is free.
template <typename T, int kHeadDim>
class TileSummer {
 public:
  using Copier = TileCopier<T, kHeadDim>;

  __device__ __forceinline__ TileSummer(DecodeArgs const& args, char* stages,
                                        uint32_t (&non_finite)[2][2])
      : args_(args.call), partials_(args.partials), stages_(stages), non_finite_(non_finite) {}

  __device__ __forceinline__ void sum(Item const& item, Copier& copier) {
    Pair const pair = pairOf(item);
    uint32_t queries[kSteps][4];
    loadQueries(item, pair, queries);
    int const position = positionOf(item, pair.row);
    int const first_position = positionOf(item, item.rows.begin);
    Target const target = targetOf(item, pair, position);
    bool const is_known = item.lookup.table != nullptr && isPosition(args_, position);
    TileShape const shape{min(lane() / 4, item.count() - 1) * kScoreRow + lane() % 4 * 8,
                          lane() / 4 < item.count(), hasOneRow(item)};
    storeRows(item);
    RowState state;
    float sums[kColumns][4];
    state.clear();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
    }
    int const last_key = item.last_key;
    for (int first_key = item.first_key; first_key <= last_key; first_key += kTileKeys) {
      char* const key_tile = nextStage(copier);
      scoreKeys(shape, queries, key_tile);
      __syncthreads();
      if (++num_tiles_ > 1) copier.copyNext();
      addTile(shape, first_key, first_position, position, key_tile, state, sums);
    }
    state.quadSum();
    if (!is_known) state.sum[0] = quietNan();
    hand(target, state, sums);
  }

 private:
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kColumns = kHeadDim / 8 / kWarps;  // groups of 8 channels, of a warp
  static_assert(kHeadDim % (8 * kWarps) == 0);
  // Scores lie over the K that they were made of: a warp's as [8 pairs][16 keys].
  static constexpr int kScoreRow = 24 * sizeof(float);  // 4 rows side by side hit all banks
  static_assert(kTilePairs * kScoreRow <= kWarpKeys * Layout::kRowBytes);

  // What an item's tiles have in common, for a thread.
  struct TileShape {
    int32_t scores;  // bytes from a warp's first score to the thread's first
    bool is_pair;    // has the thread's row
    bool has_one_row;
  };

  // Waits for the warp's part of the next tile.
  __device__ __forceinline__ char* nextStage(Copier& copier) {
    // Before the first barrier no more has been asked for than fills all stages.
    if (num_tiles_ == 0) {
      waitForCopiesBut<kStages - 1>();
    } else {
      waitForCopiesBut<kStages - 2>();
    }
    __syncwarp();
    char* const stage = stages_ + stage_ * kStageBytes<kHeadDim>;
    if (++stage_ == kStages) stage_ = 0;
    return stage;
  }

  // Of the thread's row of an mma, whose other one, of the lower half, is empty; past the item's
  // last pair, that one again.
  __device__ __forceinline__ static Pair pairOf(Item const& item) {
    int const index = min(lane() / 4, item.count() - 1);
    int const row = hasOneRow(item) ? 0 : index / item.num_heads;
    return {item.rows.begin + row, item.first_head + index - row * item.num_heads};
  }

  __device__ __forceinline__ static bool hasOneRow(Item const& item) {
    return item.rows.end - item.rows.begin == 1;
  }

  __device__ __forceinline__ int positionOf(Item const& item, int row) const {
    return row == item.lookup.rows.end - 1 ? item.lookup.last_new : args_.p.positions[row];
  }

  // Q of the tile's pairs as left operands; zeros where there is no pair.
  __device__ __forceinline__ void loadQueries(Item const& item, Pair const& pair,
                                              uint32_t (&queries)[kSteps][4]) const {
    bool const is_pair = lane() / 4 < item.count();
    T const* const from = static_cast<T const*>(args_.p.qkv) + pair.row * qkvWidth(args_) +
                          pair.head * kHeadDim + lane() % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queries[step][0] = is_pair ? twoAt(from + 16 * step) : 0;
      queries[step][2] = is_pair ? twoAt(from + 16 * step + 8) : 0;
      queries[step][1] = queries[step][3] = 0;
    }
  }

  // Stores K and V of the item's own rows that lie in its split.
  __device__ __forceinline__ void storeRows(Item const& item) const {
    if (item.first_head != item.lookup.kv_head * args_.group ||
        item.last_key < item.lookup.first_new) {
      return;
    }
    int const half = lane() / Layout::kChunks;
    if (half > 1) return;
    for (int row = item.rows.begin + warp(); row < item.rows.end; row += kWarps) {
      int const position = positionOf(item, row);
      if (position < item.first_key || position > item.last_key) continue;
      int const channel = (lane() - half * Layout::kChunks) * 8;
      T const* const from = static_cast<T const*>(args_.p.qkv) +
                            newKeyOffset(args_, row, item.lookup.kv_head) +
                            half * args_.layer.tokenStride();
      auto const chunk = loadVec<T, 8>(from + channel);  // on its way while its place is looked up
      if (T* const to = placeOf<T>(args_, item.lookup, position); to != nullptr) {
        storeVec(to + half * args_.layer.halfStride() + channel, chunk);
      }
    }
  }

  // Leaves the scores of the warp's keys where their K was.
  __device__ __forceinline__ void scoreKeys(TileShape const& shape,
                                            uint32_t const (&queries)[kSteps][4],
                                            char* key_tile) const {
    char* const own = key_tile + warp() * kWarpKeys * Layout::kRowBytes;
    float scores[2][4];
    multiplySixteenKeys<T, kHeadDim>(scores, queries, sharedAddress(own));
    __syncwarp();
    if (!shape.is_pair) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      *reinterpret_cast<float2*>(own + shape.scores + 32 * j) =
          make_float2(scores[j][0], scores[j][1]);
    }
  }

  // The thread's part of all warps' scores.
  __device__ __forceinline__ void gatherScores(TileShape const& shape, char const* key_tile,
                                               float (&scores)[8][4]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 const two = *reinterpret_cast<float2 const*>(
          key_tile + shape.scores + j / 2 * kWarpKeys * Layout::kRowBytes + 32 * (j % 2));
      scores[j][0] = two.x;
      scores[j][1] = two.y;
      scores[j][2] = scores[j][3] = 0.0f;
    }
  }

  __device__ __forceinline__ void addTile(TileShape const& shape, int first_key, int first_position,
                                          int position, char* key_tile, RowState& state,
                                          float (&sums)[kColumns][4]) {
    char* const value_tile = key_tile + kStageBytes<kHeadDim> / 2;
    float scores[8][4];
    gatherScores(shape, key_tile, scores);
    uint2 found = make_uint2(0, 0);
    if (first_key + kTileKeys - 1 > first_position) {
      int const positions[2] = {position, position};
      hideKeys(scores, first_key, positions);
      if (!shape.has_one_row) {
        uint32_t (&noted)[2] = non_finite_[noted_];
        noted_ ^= 1;
        removeNonFinite<T, Layout>(value_tile, noted, threadIdx.x, kBlock);
        if (threadIdx.x < 2) non_finite_[noted_][threadIdx.x] = 0;
        __syncthreads();
        found = make_uint2(noted[0], noted[1]);
      }
    }
    float const fade[2] = {weigh(scores, state, args_.scale, 0), 1.0f};
#pragma unroll
    for (int j = 0; j < 8; ++j) scores[j][2] = scores[j][3] = 0.0f;
    fadeSums(sums, fade);
    addValueColumns<T, kHeadDim>(sums, scores, sharedAddress(value_tile), warp() * kColumns);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[j][2] = sums[j][3] = 0.0f;
    if ((found.x | found.y) != 0 && seesOne(found, first_key, position)) state.sum[0] = quietNan();
  }

  // Where the thread gives its pair's sums of a split on.
  struct Target {
    int64_t place;   // of a partial result, or the pair's among all results; -1: nowhere
    bool is_result;  // of a row without another split
  };

  // Found while keys are on their way.
  __device__ __forceinline__ Target targetOf(Item const& item, Pair const& pair,
                                             int position) const {
    bool const is_result = splitOf(clampPosition(args_, position)) == 0;
    if (lane() / 4 >= item.count() || (is_result && item.split != 0)) return {-1, is_result};
    if (is_result) return {int64_t{pair.row} * args_.p.num_heads + pair.head, is_result};
    int64_t const partial_row =
        partials_.are_of_every_row
            ? pair.row
            : int64_t{item.sequence} * args_.few_rows + pair.row - item.lookup.rows.begin;
    return {partialIndex(args_, partial_row, pair.head) + item.split, is_result};
  }

  __device__ __forceinline__ void hand(Target const& target, RowState const& state,
                                       float const (&sums)[kColumns][4]) const {
    if (target.place < 0) return;
    int64_t const first = target.place * kHeadDim + 8 * warp() * kColumns + lane() % 4 * 2;
    if (!target.is_result) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        *reinterpret_cast<float2*>(partials_.values + first + 8 * j) =
            make_float2(sums[j][0], sums[j][1]);
      }
      if (warp() == 0 && lane() % 4 == 0) {
        partials_.summary[target.place] = make_float2(state.top[0], state.sum[0]);
      }
      return;
    }
    Fold const fold(negativeInfinity(), state.top[0]);
    Normalise const normalise(fold(0.0f, state.sum[0]));
    T* const to = static_cast<T*>(args_.p.attended) + first;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float const low = normalise(fold(0.0f, sums[j][0]));
      float const high = normalise(fold(0.0f, sums[j][1]));
      *reinterpret_cast<uint32_t*>(to + 8 * j) = Packed<T>::roundTo(low, high);
    }
  }

  AttentionArgs const& args_;
  Partials const& partials_;
  char* stages_;
  uint32_t (&non_finite_)[2][2];
  int32_t noted_ = 0;  // of non_finite, the one that is zero
  int32_t stage_ = 0;
  int32_t num_tiles_ = 0;  // past the barrier
};

// Blocks take the call's items in turn; how many blocks there are changes no bits.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kBlock, kBlocksAnSm<kHeadDim>)
    decodeAttentionKernel(DecodeArgs const args) {
  extern __shared__ __align__(128) char stages[];
  __shared__ WarpShared shared[kWarps];
  __shared__ uint32_t non_finite[2][2];
  // Tables, positions and the pool may be read at once: a kernel that writes them ends before the
  // next one starts. Rows of qkv may not.
  TileCopier<T, kHeadDim> copier(args, sharedAddress(stages), shared[warp()]);
  if (threadIdx.x < 4) non_finite[threadIdx.x / 2][threadIdx.x % 2] = 0;
  bool has_waited = false;
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) {
    if (!has_waited && copier.nextHasNewKeys()) {
      waitForInputsAlone();
      has_waited = true;
    }
    copier.copyNext();
  }
  if (!has_waited) waitForInputsAlone();
  if (args.call.max_splits > 1) letNextStart();  // the fold
  TileSummer<T, kHeadDim> summer(args, stages, non_finite);
  while (copier.hasItem()) summer.sum(copier.takeItem(), copier);
}

template <typename T, int kHeadDim>
cudaError_t launch(AttentionArgs const& args, cudaStream_t stream) {
  auto* const kernel = decodeAttentionKernel<T, kHeadDim>;
  int const bytes = kStages * kStageBytes<kHeadDim>;
  if (bytes > args.shared_bytes) return cudaErrorInvalidConfiguration;
  if (cudaError_t error = prepareShared(kernel, bytes); error != cudaSuccess) return error;
  int64_t const row_tiles = args.decodes_all ? args.p.num_rows : args.p.num_sequences;
  int64_t const most = row_tiles * args.p.num_kv_heads * args.head_tiles * args.max_splits;
  if (most > 1 << 30 || args.p.num_heads > 65535) return cudaErrorInvalidValue;
  int blocks_an_sm = 0;
  if (cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_an_sm, kernel, kBlock, bytes);
      error != cudaSuccess) {
    return error;
  }
  int const grid = std::min<int64_t>(most, int64_t{args.num_sms} * std::max(blocks_an_sm, 1));
  // Many tiles not before the last kernel has ended: on an H200, 32 sequences of 2048 then took 178
  // us instead of 142, and 8 rows of 440 tiles at 576 positions 38.2 instead of 36.0; 8 rows of 128
  // tiles took 16.4 instead of 17.1 by starting early. Uneven placement of blocks beside the last
  // fold's is a guess, not proven.
  int64_t const tiles = args.p.num_rows * args.p.num_kv_heads * args.head_tiles;
  bool const is_early = args.decodes_all && tiles <= kMaxEarlyTiles;
  DecodeArgs const decode_args{args, Partials(args), TileDividers(args)};
  Start const start = is_early ? Start::kOverlapping : Start::kAfterPrevious;
  if (cudaError_t error =
          launchKernel(kernel, dim3(grid), kBlock, stream, decode_args, bytes, start);
      error != cudaSuccess || args.max_splits == 1) {
    return error;
  }
  return launchSplitFold(args, stream);
}

}  // namespace

cudaError_t launchDecodeAttention(AttentionArgs const& args, cudaStream_t stream) {
  return dispatchTensorCores(args.p, [&](auto tag, auto head_dim) {
    return launch<typename decltype(tag)::Type, decltype(head_dim)::value>(args, stream);
  });
}

}  // namespace looptrt
