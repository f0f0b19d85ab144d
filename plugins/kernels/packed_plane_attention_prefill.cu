#include <cuda_runtime.h>

#include <algorithm>

#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_source.cuh"
#include "packed_plane_attention_tile.cuh"

namespace looptrt {
namespace {

constexpr int kStages = 2;  // tiles of K and V in shared memory
constexpr int kStaticBytes = 2 * kTileKeys * (sizeof(KeySource) + sizeof(void*)) + 128;

template <int kHeadDim>
constexpr int kTileBytes = kTileKeys * TileLayout<kHeadDim>::kRowBytes;
// What a warp has folded.
template <int kHeadDim>
constexpr int kWarpBytes = kRowsAWarp * kHeadDim * int{sizeof(float)};
template <int kHeadDim>
constexpr int kBlocksAnSm = kHeadDim == 64 ? 3 : 1;

struct QueryTile {
  int32_t sequence;  // -1: no such tile
  int32_t const* table;
  RowRange sequence_rows;
  RowRange rows;
};

// The index-th tile of all sequences with more than a few rows. Tiles are cut from a sequence's end
// on: the last rows, which see the most keys, come first and fill a tile. Every warp finds it.
__device__ __forceinline__ QueryTile findTile(AttentionArgs const& args, int rows_a_tile,
                                              int index) {
  int const lane = threadIdx.x % 32;
  for (int base = 0; base < args.p.num_sequences; base += 32) {
    RowRange rows{0, 0};
    int32_t const* table = nullptr;
    if (base + lane < args.p.num_sequences) {
      rows = rowsOf(args, base + lane);
      table = tableOf(args, base + lane);
    }
    int const count = rows.end - rows.begin;
    int const tiles = hasFewRows(args, count) ? 0 : (count + rows_a_tile - 1) / rows_a_tile;
    int through = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int const before = __shfl_up_sync(0xffffffffu, through, step);
      if (lane >= step) through += before;
    }
    uint32_t const after = __ballot_sync(0xffffffffu, through > index);
    if (after != 0) {
      int const owner = __ffs(after) - 1;
      int const tile = index - __shfl_sync(0xffffffffu, through - tiles, owner);
      QueryTile found;
      found.sequence = base + owner;
      found.table = reinterpret_cast<int32_t const*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(table), owner));
      found.sequence_rows.begin = __shfl_sync(0xffffffffu, rows.begin, owner);
      found.sequence_rows.end = __shfl_sync(0xffffffffu, rows.end, owner);
      found.rows.end = found.sequence_rows.end - tile * rows_a_tile;
      found.rows.begin = max(found.rows.end - rows_a_tile, found.sequence_rows.begin);
      return found;
    }
    index -= __shfl_sync(0xffffffffu, through, 31);
  }
  return {-1, nullptr, {0, 0}, {0, 0}};
}

// 16 rows a warp of a sequence and one query head; keys in tiles of 64, copied one tile ahead.
// Grid: x query heads, y tiles. The number of warps changes no bits.
template <typename T, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kBlocksAnSm<kHeadDim>)
    prefillAttentionKernel(AttentionArgs const args) {
  using Layout = TileLayout<kHeadDim>;
  constexpr int kChunks = Layout::kChunks;
  constexpr int kColumns = kHeadDim / 8;
  static_assert(kRowsAWarp * Layout::kRowBytes <= kWarpBytes<kHeadDim>, "queries pass through it");

  extern __shared__ __align__(128) char shared[];
  __shared__ KeySource sources[2][kTileKeys];
  __shared__ T* places[2][kTileKeys];  // where the block's own K is to be stored, or null
  __shared__ uint32_t non_finite[2][2];
  PackedPlaneAttentionParams const& p = args.p;
  int const thread = threadIdx.x;
  constexpr int kThreads = kWarps * 32;
  constexpr int kRowsATile = kWarps * kRowsAWarp;
  int const warp = thread / 32;
  int const lane = thread % 32;
  char* const stages = shared;
  char* const own_bytes = stages + kStages * 2 * kTileBytes<kHeadDim> + warp * kWarpBytes<kHeadDim>;
  // What the thread's rows have folded: a column pair of rows g and g + 8 each. Before that, where
  // the warp's queries arrive.
  float4* const totals = reinterpret_cast<float4*>(own_bytes) + lane;

  waitForInputsAlone();  // it stores K and V
  QueryTile const tile = findTile(args, kRowsATile, blockIdx.y);
  if (tile.sequence < 0) return;
  int const head = blockIdx.x;
  auto const* const qkv = static_cast<T const*>(p.qkv);
  int const last_row = tile.rows.end - 1;
  // Rows past the tile's end repeat its last one and are not stored.
  int const first_row = tile.rows.begin + warp * kRowsAWarp;
  for (int item = lane; item < kRowsAWarp * kChunks; item += 32) {
    int const row = item / kChunks;
    int const chunk = item - row * kChunks;
    int64_t const from = min(first_row + row, last_row) * qkvWidth(args) + head * kHeadDim;
    copyAsync16(sharedAddress(own_bytes) + Layout::byteOffset(row, chunk), qkv + from + chunk * 8);
  }
  commitCopies();
  int const kv_head = head / args.group;
  bool const stores = head == kv_head * args.group;
  int const block_first = p.positions[tile.rows.begin];
  int const last_position = clampPosition(args, p.positions[last_row]);
  KeyLookup const lookup{tile.table, tile.sequence_rows, p.positions[tile.sequence_rows.begin],
                         p.positions[tile.sequence_rows.end - 1], kv_head};
  KeyLookup const own{tile.table, tile.rows, block_first, p.positions[last_row], kv_head};
  int const num_tiles = last_position / kTileKeys + 1;
  KvPool<T> const pool(args);
  auto const findKey = [&](int key) {
    return sourceOf(args, pool, lookup, entryOf(args, lookup, key, last_position), key);
  };
  auto const hasOwn = [&](int index) {
    return stores && index * kTileKeys + kTileKeys - 1 >= block_first;
  };
  auto const findPlace = [&](int key) {
    return key > last_position ? nullptr : placeOf<T>(args, own, key);
  };
  constexpr int kItems = kTileKeys * kChunks;
  constexpr int kCopies = (kItems + kThreads - 1) / kThreads;
  auto const itemOf = [&](int i) { return thread + i * kThreads; };
  auto const isItem = [&](int i) { return kItems % kThreads == 0 || itemOf(i) < kItems; };
  auto const copyTile = [&](int index) {
    if (index < num_tiles) {
      uint32_t const keys = sharedAddress(stages) + index % kStages * 2 * kTileBytes<kHeadDim>;
      KeySource from[kCopies];  // all asked for before the first is used
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (isItem(i)) from[i] = sources[index % 2][itemOf(i) / kChunks];
      }
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (!isItem(i)) continue;
        int const key = itemOf(i) / kChunks;
        int const chunk = itemOf(i) % kChunks;
        uint32_t const to = keys + Layout::byteOffset(key, chunk);
        copyChunkOrZero(to, from[i].key, chunk);
        copyChunkOrZero(to + kTileBytes<kHeadDim>, from[i].value, chunk);
      }
    }
    commitCopies();
  };
  auto const storeTile = [&](int index, char const* key_tile) {
    for (int item = thread; item < kTileKeys * kChunks; item += kThreads) {
      int const key = item / kChunks;
      int const chunk = item - key * kChunks;
      T* const place = places[index % 2][key];
      if (place == nullptr) continue;
      char const* const from = key_tile + Layout::byteOffset(key, chunk);
      reinterpret_cast<uint4*>(place)[chunk] = *reinterpret_cast<uint4 const*>(from);
      reinterpret_cast<uint4*>(place + args.layer.halfStride())[chunk] =
          *reinterpret_cast<uint4 const*>(from + kTileBytes<kHeadDim>);
    }
  };

  for (int item = thread; item < 2 * kTileKeys; item += kThreads) {
    sources[item / kTileKeys][item % kTileKeys] = findKey(item);
  }
  // The last threads: the first ones have sources to find.
  int const place_key = kThreads - 1 - thread;
  if (hasOwn(0) && place_key < kTileKeys) places[0][place_key] = findPlace(place_key);
  if (thread < 4) non_finite[thread / 2][thread % 2] = 0;
  __syncthreads();
  copyTile(0);
  KeySource upcoming;  // of the tile after the next: asked for early, needed late
  if (thread < kTileKeys) upcoming = findKey(2 * kTileKeys + thread);

  int const warp_first = p.positions[min(first_row, last_row)];
  int const warp_last = p.positions[min(first_row + kRowsAWarp - 1, last_row)];
  int positions[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    positions[half] = p.positions[min(first_row + lane / 4 + 8 * half, last_row)];
  }

  int split = 0;
  RowState total;
  RowState state;
  float sums[kColumns][4];
  total.clear();
  state.clear();
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
  }
  auto const foldSplit = [&]() {
    state.quadSum();
    Fold const folds[2] = {{total.top[0], state.top[0]}, {total.top[1], state.top[1]}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total.top[half] = folds[half].top;
      total.sum[half] = folds[half](total.sum[half], state.sum[half]);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float4 const four = split == 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : totals[j * 32];
      totals[j * 32] = make_float4(folds[0](four.x, sums[j][0]), folds[0](four.y, sums[j][1]),
                                   folds[1](four.z, sums[j][2]), folds[1](four.w, sums[j][3]));
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
    }
    state.clear();
  };

  uint32_t queries[kHeadDim / 16][4];
  waitForCopiesBut<1>();
  __syncwarp();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    loadMatrices(queries[step],
                 sharedAddress(own_bytes) + Layout::byteOffset(lane % 16, 2 * step + lane / 16));
  }
  int split_end = splitBegin(1);
  for (int index = 0; index < num_tiles; ++index) {
    int const first_key = index * kTileKeys;
    waitForCopiesBut<0>();
    __syncthreads();
    copyTile(index + 1);
    if (thread < kTileKeys) {
      sources[index % 2][thread] = upcoming;
      upcoming = findKey((index + 3) * kTileKeys + thread);
    }
    if (hasOwn(index + 1) && place_key < kTileKeys) {
      places[(index + 1) % 2][place_key] = findPlace(first_key + kTileKeys + place_key);
    }
    char* const key_tile = stages + index % kStages * 2 * kTileBytes<kHeadDim>;
    char* const value_tile = key_tile + kTileBytes<kHeadDim>;
    if (hasOwn(index)) storeTile(index, key_tile);
    uint2 found = make_uint2(0, 0);
    if (first_key + kTileKeys - 1 > block_first) {
      uint32_t* const noted = non_finite[index % 2];
      removeNonFinite<T, kHeadDim>(value_tile, noted, thread, kThreads);
      if (thread < 2) non_finite[(index + 1) % 2][thread] = 0;
      __syncthreads();
      found = make_uint2(noted[0], noted[1]);
    }
    if (first_key == split_end) {
      foldSplit();
      ++split;
      split_end = splitBegin(split + 1);
    }
    if (first_key > warp_last) continue;

    float scores[8][4];
    multiplyKeys<T, kHeadDim>(
        scores,
        [&](int step, uint32_t (&a)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = queries[step][i];
        },
        sharedAddress(key_tile));
    if (first_key + kTileKeys - 1 > warp_first) hideKeys(scores, first_key, positions);
    float const fade[2] = {weigh(scores, state, args.scale, 0),
                           weigh(scores, state, args.scale, 1)};
    fadeSums(sums, fade);
    addValues<T, kHeadDim>(sums, scores, sharedAddress(value_tile));
    if ((found.x | found.y) != 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (seesOne(found, first_key, positions[half])) state.sum[half] = quietNan();
      }
    }
  }
  foldSplit();

  auto* const attended = static_cast<T*>(p.attended);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = first_row + lane / 4 + 8 * half;
    if (row > last_row) continue;
    bool const is_known = tile.table != nullptr && isPosition(args, positions[half]);
    Normalise const normalise(is_known ? total.sum[half] : quietNan());
    T* const to = attended + int64_t{row} * p.num_heads * kHeadDim + head * kHeadDim + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float4 const four = totals[j * 32];
      *reinterpret_cast<uint32_t*>(to + 8 * j) = Packed<T>::roundTo(
          normalise(half == 0 ? four.x : four.z), normalise(half == 0 ? four.y : four.w));
    }
  }
}

template <int kHeadDim, int kWarps>
constexpr int kBlockBytes = 2 * kStages * kTileBytes<kHeadDim> + kWarps * kWarpBytes<kHeadDim>;

template <int kWarps>
int64_t mostTiles(AttentionArgs const& args) {
  return args.p.num_rows / (kWarps * kRowsAWarp) + args.p.num_sequences;
}

// With the first number of warps whose block has enough shared memory and of which there are enough
// blocks that no multiprocessor is left without one; else with the last.
template <typename T, int kHeadDim, int kWarps, int... kFewerWarps>
cudaError_t launch(AttentionArgs const& args, cudaStream_t stream) {
  constexpr int kBytes = kBlockBytes<kHeadDim, kWarps>;
  int64_t const tiles = mostTiles<kWarps>(args);
  if constexpr (sizeof...(kFewerWarps) > 0) {
    if (kBytes + kStaticBytes > args.shared_bytes || tiles * args.p.num_heads < args.num_sms) {
      return launch<T, kHeadDim, kFewerWarps...>(args, stream);
    }
  }
  if (kBytes + kStaticBytes > args.shared_bytes) return cudaErrorInvalidConfiguration;
  if (tiles > 65535) return cudaErrorInvalidValue;
  auto* const kernel = prefillAttentionKernel<T, kHeadDim, kWarps>;
  if (cudaError_t error = prepareShared(kernel, kBytes); error != cudaSuccess) return error;
  dim3 const grid(args.p.num_heads, tiles);
  return launchKernel(kernel, grid, kWarps * 32, stream, args, kBytes, Start::kOverlapping);
}

}  // namespace

cudaError_t launchPrefillAttention(AttentionArgs const& args, cudaStream_t stream) {
  return dispatchTensorCores(args.p, [&](auto tag, auto head_dim) {
    using T = typename decltype(tag)::Type;
    constexpr int kHeadDim = decltype(head_dim)::value;
    // Warps of a block, as many as registers and shared memory have place for. At 64 channels they
    // hold several small blocks, of which others work while one waits at a barrier: measured faster
    // there, slower at more. 12 warps are faster at 96 channels, 8 at 128; 3 fit in 99 KiB.
    if constexpr (kHeadDim == 64) return launch<T, kHeadDim, 4>(args, stream);
    if constexpr (kHeadDim == 96) return launch<T, kHeadDim, 12, 8, 4>(args, stream);
    if constexpr (kHeadDim == 128) return launch<T, kHeadDim, 8, 4, 3>(args, stream);
  });
}

}  // namespace looptrt
