#include <cuda_runtime.h>

#include <algorithm>

#include "looptrt/dispatch.cuh"
#include "looptrt/vec.cuh"
#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_source.cuh"
#include "packed_plane_attention_tile.cuh"

namespace looptrt {
namespace {

constexpr int kLanes = 32;
constexpr int kBlock = 2 * kLanes;  // a warp that copies, a warp that sums
constexpr int kStages = 2;          // tiles of K and V in shared memory
constexpr int kStagesOfFew = 5;     // where a block has a multiprocessor to itself
constexpr int kSequencesAtOnce = kLanes;
constexpr int kStaticBytes = kTileKeys * sizeof(KeySource) + 128;

template <int kHeadDim>
constexpr int kStageBytes = 2 * kTileKeys * TileLayout<kHeadDim>::kRowBytes;

struct DecodeArgs {
  AttentionArgs call;
  int32_t num_stages;
};

// Where a decode tile's partial results lie: of a row and head, all splits one after the other.
struct Partials {
  float* values;    // [partial rows, num_heads, max_splits, head_dim]
  float2* summary;  // [partial rows, num_heads, max_splits]: RowState's top and sum

  __host__ __device__ explicit Partials(AttentionArgs const& args) {
    int64_t const count = args.partialRows() * args.p.num_heads * args.max_splits;
    values = static_cast<float*>(args.p.workspace);
    summary = reinterpret_cast<float2*>(values + count * args.p.head_dim);
  }
};

__device__ __forceinline__ int64_t partialIndex(AttentionArgs const& args, int64_t partial_row,
                                                int head) {
  return (partial_row * args.p.num_heads + head) * args.max_splits;
}

// A sequence with decode tiles.
struct Sequence {
  int32_t const* table;
  RowRange rows;
  int32_t first_position, last_position;  // of its rows
  int32_t num_splits;                     // of its last row
};

// The work of a round: tiles of up to 32 sequences, one a lane, cut into splits.
struct Round {
  Sequence sequence;
  int32_t units;          // (row tile, split) pairs of the sequence
  int32_t units_through;  // of all lanes up to this one
};

__device__ __forceinline__ Round planRound(AttentionArgs const& args, int base) {
  int const lane = threadIdx.x % kLanes;
  int const index = base + lane;
  Round round{};
  if (index < args.p.num_sequences) {
    Sequence& sequence = round.sequence;
    // Asked for together with cu_seqlens: most sequences of a decode step have one row.
    int32_t const likely_position = index < args.p.num_rows ? args.p.positions[index] : 0;
    sequence.table = tableOf(args, index);
    sequence.rows = rowsOf(args, index);
    int const count = sequence.rows.end - sequence.rows.begin;
    if (count > 0 && hasFewRows(args, count)) {
      int const last_row = sequence.rows.end - 1;
      sequence.last_position = last_row == index ? likely_position : args.p.positions[last_row];
      sequence.first_position =
          count == 1 ? sequence.last_position : args.p.positions[sequence.rows.begin];
      sequence.num_splits = splitOf(clampPosition(args, sequence.last_position)) + 1;
      round.units = (count + args.rows_a_tile - 1) / args.rows_a_tile * sequence.num_splits;
    }
  }
  round.units_through = round.units;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int const before = __shfl_up_sync(0xffffffffu, round.units_through, step);
    if (lane >= step) round.units_through += before;
  }
  return round;
}

// One split of a decode tile: up to 16 (row, head) pairs of a sequence that share a kv head.
struct Item {
  KeyLookup lookup;
  RowRange rows;
  int32_t sequence, first_head, num_heads;
  int32_t split;
  int32_t first_key, last_key;  // of the split, no further than the tile's last position

  __device__ __forceinline__ int count() const { return (rows.end - rows.begin) * num_heads; }
};

// Index to item: heads run fastest, so that blocks side by side read neighbouring memory; then
// splits, a sequence's last and longest first. False for a split that the tile does not reach.
__device__ __forceinline__ bool findItem(AttentionArgs const& args, Round const& round, int base,
                                         int index, Item& item) {
  int const heads = args.p.num_kv_heads * args.head_tiles;
  int const unit = index / heads;
  int const head = index - unit * heads;
  int const owner = __ffs(__ballot_sync(0xffffffffu, round.units_through > unit)) - 1;
  auto const ofOwner = [&](auto value) { return __shfl_sync(0xffffffffu, value, owner); };
  int const num_splits = ofOwner(round.sequence.num_splits);
  int const within = unit - ofOwner(round.units_through - round.units);
  int const tile = within / num_splits;
  KeyLookup& lookup = item.lookup;
  lookup.table =
      reinterpret_cast<int32_t const*>(ofOwner(reinterpret_cast<uint64_t>(round.sequence.table)));
  lookup.rows = {ofOwner(round.sequence.rows.begin), ofOwner(round.sequence.rows.end)};
  lookup.first_new = ofOwner(round.sequence.first_position);
  lookup.kv_head = head / args.head_tiles;
  int last_position = ofOwner(round.sequence.last_position);
  lookup.last_new = last_position;
  item.sequence = base + owner;
  item.rows.begin = lookup.rows.begin + tile * args.rows_a_tile;
  item.rows.end = min(item.rows.begin + args.rows_a_tile, lookup.rows.end);
  int const head_in_group = (head - lookup.kv_head * args.head_tiles) * args.heads_a_tile;
  item.first_head = lookup.kv_head * args.group + head_in_group;
  item.num_heads = min(args.heads_a_tile, args.group - head_in_group);
  item.split = num_splits - 1 - (within - tile * num_splits);
  item.first_key = splitBegin(item.split);
  if (item.rows.end != lookup.rows.end) last_position = args.p.positions[item.rows.end - 1];
  item.last_key = min(splitBegin(item.split + 1) - 1, clampPosition(args, last_position));
  return item.first_key <= item.last_key;
}

// One (row, head) pair of a tile.
struct Pair {
  int32_t row, head, position;
};

template <typename T>
__device__ __forceinline__ uint32_t twoAt(T const* from) {
  return *reinterpret_cast<uint32_t const*>(from);
}

// The warp that copies tiles of K and V into a ring of stages, num_stages - 1 tiles ahead of the
// one that sums, across the block's items. Both stand at a barrier a tile: the tile is there, and
// the tile before it has been summed, so that its stage is free.
template <typename T, int kHeadDim>
class TileCopier {
 public:
  __device__ __forceinline__ TileCopier(DecodeArgs const& decode, uint32_t stages,
                                        KeySource* sources)
      : decode_(decode), stages_(stages), sources_(sources) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      int const item = lane() + i * kLanes;
      to_[i] = Layout::byteOffset(item / kChunks, item % kChunks);
    }
  }

  __device__ __forceinline__ void copy(Item const& item) {
    int const num_tiles = (item.last_key - item.first_key) / kTileKeys + 1;
    KeySource upcoming[2];  // keys lane and lane + 32 of the next tile
    find(item, 0, upcoming);
    for (int index = 0; index < num_tiles; ++index) {
      __syncwarp();  // the last tile's sources have been read
      sources_[lane()] = upcoming[0];
      sources_[lane() + kLanes] = upcoming[1];
      __syncwarp();
      if (index + 1 < num_tiles) find(item, index + 1, upcoming);
      if (num_copied_ >= ahead()) offerTile();
      copyTile();
      commitCopies();
      ++num_copied_;
    }
    storeRows(item);
  }

  // Offers the tiles that are still on their way.
  __device__ __forceinline__ void finish() {
    for (int i = num_copied_; i < ahead(); ++i) commitCopies();
    for (int left = min(num_copied_, ahead()); left > 0; --left) {
      offerTile();
      commitCopies();
    }
  }

 private:
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kChunks = Layout::kChunks;
  static constexpr int kGroupKeys = 8;  // after which a lane's chunks and their places repeat
  static constexpr int kCopies = kGroupKeys * kChunks / kLanes;
  static_assert(kGroupKeys * kChunks % kLanes == 0 && kTileKeys == 2 * kLanes);

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ int ahead() const { return decode_.num_stages - 1; }

  __device__ __forceinline__ void find(Item const& item, int index, KeySource (&sources)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const key = item.first_key + index * kTileKeys + lane() + i * kLanes;
      sources[i] = sourceOf<T>(decode_.call, item.lookup, key, item.last_key);
    }
  }

  __device__ __forceinline__ void copyTile() {
    uint32_t const keys = stages_ + stage_ * kStageBytes<kHeadDim>;
    if (++stage_ == decode_.num_stages) stage_ = 0;
#pragma unroll 2
    for (int group = 0; group < kTileKeys / kGroupKeys; ++group) {
      KeySource const* const sources = sources_ + group * kGroupKeys;
      uint32_t const group_keys = keys + group * kGroupKeys * Layout::kRowBytes;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        int const item = lane() + i * kLanes;
        KeySource const source = sources[item / kChunks];
        copyChunkOrZero(group_keys + to_[i], source.key, item % kChunks);
        copyChunkOrZero(group_keys + kStageBytes<kHeadDim> / 2 + to_[i], source.value,
                        item % kChunks);
      }
    }
  }

  // Waits for the oldest tile on its way and hands it over.
  __device__ __forceinline__ void offerTile() const {
    switch (decode_.num_stages) {
      case 5:
        waitForCopiesBut<3>();
        break;
      case 4:
        waitForCopiesBut<2>();
        break;
      case 3:
        waitForCopiesBut<1>();
        break;
      default:
        waitForCopiesBut<0>();
    }
    syncWarps<kBlock>();
  }

  // Stores K and V of the item's own rows that lie in its split.
  __device__ __forceinline__ void storeRows(Item const& item) const {
    AttentionArgs const& args = decode_.call;
    if (item.first_head != item.lookup.kv_head * args.group) return;
    int const half = lane() / kChunks;
    if (half > 1) return;
    for (int row = item.rows.begin; row < item.rows.end; ++row) {
      int const position = args.p.positions[row];
      if (position < item.first_key || position > item.last_key) continue;
      T* const to = placeOf<T>(args, item.lookup, position);
      if (to == nullptr) continue;
      int const channel = (lane() - half * kChunks) * 8;
      T const* const from = static_cast<T const*>(args.p.qkv) +
                            newKeyOffset(args, row, item.lookup.kv_head) +
                            half * args.layer.tokenStride();
      storeVec(to + half * args.layer.halfStride() + channel, loadVec<T, 8>(from + channel));
    }
  }

  DecodeArgs const& decode_;
  uint32_t stages_;
  KeySource* sources_;  // [kTileKeys], of the tile to copy next
  uint32_t to_[kCopies];
  int stage_ = 0;
  int num_copied_ = 0;
};

// The warp that sums the tiles, in the copier's order.
template <typename T, int kHeadDim>
class TileSummer {
 public:
  __device__ __forceinline__ TileSummer(DecodeArgs const& decode, char* stages,
                                        uint32_t* non_finite)
      : decode_(decode), stages_(stages), non_finite_(non_finite) {}

  __device__ __forceinline__ void sum(Item const& item) {
    AttentionArgs const& args = decode_.call;
    // Of the thread's rows of an mma; past the item's last pair, that one again.
    Pair pairs[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const index = min(lane() / 4 + 8 * half, item.count() - 1);
      int const row = index / item.num_heads;
      pairs[half].row = item.rows.begin + row;
      pairs[half].head = item.first_head + index - row * item.num_heads;
      pairs[half].position = args.p.positions[pairs[half].row];
    }
    int const positions[2] = {pairs[0].position, pairs[1].position};
    uint32_t queries[kSteps][4];
    loadQueries(item, pairs, queries);
    int const first_position = args.p.positions[item.rows.begin];
    RowState state;
    float sums[kColumns][4];
    state.clear();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
    }
    for (int first_key = item.first_key; first_key <= item.last_key; first_key += kTileKeys) {
      syncWarps<kBlock>();
      addTile(item, first_key, first_position, positions, queries,
              stages_ + stage_ * kStageBytes<kHeadDim>, state, sums);
      if (++stage_ == decode_.num_stages) stage_ = 0;
    }
    state.quadSum();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (item.lookup.table == nullptr || !isPosition(args, positions[half])) {
        state.sum[half] = quietNan();
      }
    }
    hand(item, pairs, state, sums);
  }

 private:
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kColumns = kHeadDim / 8;

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }

  // Q of the tile's pairs as left operands; zeros where there is no pair.
  __device__ __forceinline__ void loadQueries(Item const& item, Pair const (&pairs)[2],
                                              uint32_t (&queries)[kSteps][4]) const {
    AttentionArgs const& args = decode_.call;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool const is_pair = lane() / 4 + 8 * half < item.count();
      T const* const from = static_cast<T const*>(args.p.qkv) + pairs[half].row * qkvWidth(args) +
                            pairs[half].head * kHeadDim + lane() % 4 * 2;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        queries[step][half] = is_pair ? twoAt(from + 16 * step) : 0;
        queries[step][half + 2] = is_pair ? twoAt(from + 16 * step + 8) : 0;
      }
    }
  }

  __device__ __forceinline__ void addTile(Item const& item, int first_key, int first_position,
                                          int const (&positions)[2],
                                          uint32_t const (&queries)[kSteps][4], char* key_tile,
                                          RowState& state, float (&sums)[kColumns][4]) const {
    char* const value_tile = key_tile + kStageBytes<kHeadDim> / 2;
    float scores[8][4];
    multiplyKeys<T, kHeadDim>(
        scores,
        [&](int step, uint32_t (&a)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = queries[step][i];
        },
        sharedAddress(key_tile));
    uint2 found = make_uint2(0, 0);
    if (first_key + kTileKeys - 1 > first_position) {
      hideKeys(scores, first_key, positions);
      if (item.rows.end - item.rows.begin > 1) {
        if (lane() < 2) non_finite_[lane()] = 0;
        __syncwarp();
        removeNonFinite<T, kHeadDim>(value_tile, non_finite_, lane(), kLanes);
        __syncwarp();
        found = make_uint2(non_finite_[0], non_finite_[1]);
      }
    }
    float const scale = decode_.call.scale;
    float fade[2] = {weigh(scores, state, scale, 0), 1.0f};
    if (item.count() > 8) fade[1] = weigh(scores, state, scale, 1);
    addValues<T, kHeadDim>(sums, fade, scores, sharedAddress(value_tile));
    if ((found.x | found.y) != 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (seesOne(found, first_key, positions[half])) state.sum[half] = quietNan();
      }
    }
  }

  // Gives the split's sums on: to the result where the row has no other split, else to the fold.
  __device__ __forceinline__ void hand(Item const& item, Pair const (&pairs)[2],
                                       RowState const& state,
                                       float const (&sums)[kColumns][4]) const {
    AttentionArgs const& args = decode_.call;
    Partials const partials(args);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane() / 4 + 8 * half >= item.count()) continue;
      Pair const pair = pairs[half];
      int const column = lane() % 4 * 2;
      if (splitOf(clampPosition(args, pair.position)) == 0) {
        if (item.split != 0) continue;
        Fold const fold(negativeInfinity(), state.top[half]);
        Normalise const normalise(fold(0.0f, state.sum[half]));
        T* const to = static_cast<T*>(args.p.attended) +
                      (int64_t{pair.row} * args.p.num_heads + pair.head) * kHeadDim + column;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          float const low = normalise(fold(0.0f, sums[j][2 * half]));
          float const high = normalise(fold(0.0f, sums[j][2 * half + 1]));
          *reinterpret_cast<uint32_t*>(to + 8 * j) = Packed<T>::roundTo(low, high);
        }
      } else {
        int64_t const partial_row =
            args.hasPartialOfEveryRow()
                ? pair.row
                : int64_t{item.sequence} * args.rows_a_tile + pair.row - item.lookup.rows.begin;
        int64_t const place = partialIndex(args, partial_row, pair.head) + item.split;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          *reinterpret_cast<float2*>(partials.values + place * kHeadDim + column + 8 * j) =
              make_float2(sums[j][2 * half], sums[j][2 * half + 1]);
        }
        if (lane() % 4 == 0)
          partials.summary[place] = make_float2(state.top[half], state.sum[half]);
      }
    }
  }

  DecodeArgs const& decode_;
  char* stages_;
  uint32_t* non_finite_;  // [2]
  int stage_ = 0;
};

// Calls work for each of the block's items. Whole warps.
template <typename Work>
__device__ __forceinline__ void forEachItem(AttentionArgs const& args, Work&& work) {
  int const heads = args.p.num_kv_heads * args.head_tiles;
  for (int base = 0; base < args.p.num_sequences; base += kSequencesAtOnce) {
    Round const round = planRound(args, base);
    int const num_items = __shfl_sync(0xffffffffu, round.units_through, 31) * heads;
    for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
      Item item;
      if (findItem(args, round, base, index, item)) work(item);
    }
  }
}

// Blocks take the call's items in turn; how many blocks there are changes no bits.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kBlock) decodeAttentionKernel(DecodeArgs const decode) {
  extern __shared__ __align__(128) char stages[];
  __shared__ KeySource sources[kTileKeys];
  __shared__ uint32_t non_finite[2];
  static_assert(sizeof(sources) + sizeof(non_finite) <= kStaticBytes);
  waitForInputs();
  if (threadIdx.x < kLanes) {
    TileCopier<T, kHeadDim> copier(decode, sharedAddress(stages), sources);
    forEachItem(decode.call, [&](Item const& item) { copier.copy(item); });
    copier.finish();
  } else {
    TileSummer<T, kHeadDim> summer(decode, stages, non_finite);
    forEachItem(decode.call, [&](Item const& item) { summer.sum(item); });
  }
}

// Row and splits of a partial row; no splits where there is no row with partial results.
struct FoldedRow {
  int64_t row;
  int32_t num_splits;
};

__device__ __forceinline__ FoldedRow foldedRow(AttentionArgs const& args, int partial_row) {
  int64_t row = partial_row;
  if (args.decodes_all) {
    if (row >= args.p.cu_seqlens[args.p.num_sequences]) return {0, 0};
  } else {
    int const sequence =
        args.hasPartialOfEveryRow() ? sequenceOf(args, row) : partial_row / args.rows_a_tile;
    if (sequence == args.p.num_sequences) return {0, 0};
    RowRange const rows = rowsOf(args, sequence);
    if (!args.hasPartialOfEveryRow()) row = rows.begin + partial_row % args.rows_a_tile;
    if (row >= rows.end || !hasFewRows(args, rows.end - rows.begin)) return {0, 0};
  }
  return {row, splitOf(clampPosition(args, args.p.positions[row])) + 1};
}

// Folds a row's splits, in order. Grid: x partial rows, y heads; a thread for two channels.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim / 2) foldSplitsKernel(AttentionArgs const args) {
  constexpr int kAtOnce = 8;  // partial results asked for before the first is used
  int const head = blockIdx.y;
  // Operands may be read before the decode kernel ends: it let this one start, in every block,
  // only after it had waited for them. All threads wait all the same, for those who wait for this.
  auto const [row, num_splits] = foldedRow(args, blockIdx.x);
  waitForInputs();
  if (num_splits <= 1) return;
  int64_t const place = partialIndex(args, blockIdx.x, head);
  Partials const partials(args);
  float const* const values = partials.values + place * kHeadDim + 2 * threadIdx.x;
  float2 const* const summary = partials.summary + place;

  float top = negativeInfinity();
  float sum = 0.0f;
  float2 total = make_float2(0.0f, 0.0f);
  for (int begin = 0; begin < num_splits; begin += kAtOnce) {
    float2 split[kAtOnce];
    float2 state[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i < num_splits) {
        split[i] = *reinterpret_cast<float2 const*>(values + int64_t{begin + i} * kHeadDim);
        state[i] = summary[begin + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i < num_splits) {
        Fold const fold(top, state[i].x);
        top = fold.top;
        sum = fold(sum, state[i].y);
        total.x = fold(total.x, split[i].x);
        total.y = fold(total.y, split[i].y);
      }
    }
  }
  Normalise const normalise(sum);
  T* const to = static_cast<T*>(args.p.attended) + (row * args.p.num_heads + head) * kHeadDim;
  *reinterpret_cast<uint32_t*>(to + 2 * threadIdx.x) =
      Packed<T>::roundTo(normalise(total.x), normalise(total.y));
}

template <typename T, int kHeadDim>
cudaError_t launch(AttentionArgs const& args, cudaStream_t stream) {
  auto* const kernel = decodeAttentionKernel<T, kHeadDim>;
  auto* const fold = foldSplitsKernel<T, kHeadDim>;
  int64_t const row_tiles = args.decodes_all ? args.p.num_rows : args.p.num_sequences;
  int64_t const tiles = row_tiles * args.p.num_kv_heads * args.head_tiles;
  bool const are_few = tiles * kSplitsALength <= args.num_sms;
  int const stages = std::min(are_few ? kStagesOfFew : kStages,
                              (args.shared_bytes - kStaticBytes) / kStageBytes<kHeadDim>);
  if (stages < 2) return cudaErrorInvalidConfiguration;
  int const bytes = stages * kStageBytes<kHeadDim>;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess) {
    return error;
  }
  // The same for both, and for the next call: a multiprocessor must be idle to divide its memory
  // anew, and takes fewer blocks until it is.
  for (auto* one : {reinterpret_cast<void const*>(kernel), reinterpret_cast<void const*>(fold)}) {
    if (cudaError_t error = cudaFuncSetAttribute(
            one, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        error != cudaSuccess) {
      return error;
    }
  }
  int64_t const most = tiles * args.max_splits;
  if (most > 0x7fffffff || args.p.num_heads > 65535) return cudaErrorInvalidValue;
  int blocks_an_sm = 0;
  if (cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_an_sm, kernel, kBlock, bytes);
      error != cudaSuccess) {
    return error;
  }
  int const grid = std::min<int64_t>(most, int64_t{args.num_sms} * std::max(blocks_an_sm, 1));
  // Not before the last kernel has ended: on an H200, 32 sequences of 2048 then took 178 us instead
  // of 142. Uneven placement of blocks beside the last fold's is a guess, not proven.
  if (cudaError_t error = launchKernel(kernel, dim3(grid), kBlock, stream, DecodeArgs{args, stages},
                                       bytes, Start::kAfterPrevious);
      error != cudaSuccess || args.max_splits == 1) {
    return error;
  }
  return launchKernel(fold, dim3(args.partialRows(), args.p.num_heads), kHeadDim / 2, stream, args,
                      0, Start::kOverlapping);
}

}  // namespace

cudaError_t launchDecodeAttention(AttentionArgs const& args, cudaStream_t stream) {
  return dispatchDType(args.p.dtype, [&](auto tag) -> cudaError_t {
    using T = typename decltype(tag)::Type;
    if constexpr (sizeof(T) == 2) {
      if (args.p.head_dim == 64) return launch<T, 64>(args, stream);
      if (args.p.head_dim == 96) return launch<T, 96>(args, stream);
      if (args.p.head_dim == 128) return launch<T, 128>(args, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace looptrt
