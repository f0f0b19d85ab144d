#include <cuda_runtime.h>

#include <algorithm>

#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_products.cuh"
#include "packed_plane_attention_source.cuh"

namespace looptrt {
namespace {

constexpr int kStages = 2;  // tiles of K and V in shared memory
constexpr int kStaticBytes = 2 * kTileKeys * (sizeof(KeySource) + sizeof(void*)) + 128;

template <int kHeadDim>
constexpr int kTotalBytes = kRowsAWarp * kHeadDim * int{sizeof(float)};  // of a warp

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
// Grid: x query heads, y tiles. Neither the number of warps nor Products changes bits.
template <typename T, int kHeadDim, int kWarps, typename Products>
__device__ __forceinline__ void attendPrefill(AttentionArgs const& args) {
  using Layout = typename Products::Layout;
  constexpr int kChunks = Layout::kChunks;
  constexpr int kColumns = kHeadDim / 8;
  constexpr int kTileBytes = Products::kTileBytes;
  static_assert(Products::kKeepsQueries || Products::kWarpBytes <= kTotalBytes<kHeadDim>);

  extern __shared__ __align__(16) char shared[];
  __shared__ KeySource sources[2][kTileKeys];
  __shared__ T* places[2][kTileKeys];  // where the block's own K is to be stored, or null
  __shared__ uint32_t non_finite[2][2];
  PackedPlaneAttentionParams const& p = args.p;
  int const thread = threadIdx.x;
  constexpr int kThreads = kWarps * 32;
  constexpr int kRowsATile = kWarps * kRowsAWarp;
  int const warp = thread / 32;
  int const lane = thread % 32;
  char* const stages = shared + -sharedAddress(shared) % Products::kAlignment;
  char* const totals_of_all = stages + kStages * 2 * kTileBytes;
  // What the thread's rows have folded: a column pair of rows g and g + 8 each.
  float4* const totals =
      reinterpret_cast<float4*>(totals_of_all + warp * kTotalBytes<kHeadDim>) + lane;
  // Queries that go on into registers wait where totals will be, which no warp writes before the
  // first barrier of the tiles.
  Products products(totals_of_all + (Products::kKeepsQueries ? kWarps * kTotalBytes<kHeadDim> : 0),
                    warp);

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
    copyAsync16(products.placeOfQuery(row, chunk), qkv + from + chunk * 8);
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
      uint32_t const keys = sharedAddress(stages) + index % kStages * 2 * kTileBytes;
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
        copyChunkOrZero(to + kTileBytes, from[i].value, chunk);
      }
    }
    commitCopies();
  };
  auto const storeTile = [&](int index, char const* key_tile) {
    T* to[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      to[i] = isItem(i) ? places[index % 2][itemOf(i) / kChunks] : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (to[i] == nullptr) continue;
      int const chunk = itemOf(i) % kChunks;
      char const* const from = key_tile + Layout::byteOffset(itemOf(i) / kChunks, chunk);
      reinterpret_cast<uint4*>(to[i])[chunk] = *reinterpret_cast<uint4 const*>(from);
      reinterpret_cast<uint4*>(to[i] + args.layer.halfStride())[chunk] =
          *reinterpret_cast<uint4 const*>(from + kTileBytes);
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
  // Of the tile after the next: asked for in one turn, used in the next one.
  int32_t upcoming = 0;
  auto const findEntry = [&](int key) { return entryOf(args, lookup, key, last_position); };
  if (thread < kTileKeys) upcoming = findEntry(2 * kTileKeys + thread);

  int const warp_first = p.positions[min(first_row, last_row)];
  // Of the warps that multiply together.
  int const group_end = (first_row - tile.rows.begin) / Products::kRows * Products::kRows +
                        Products::kRows + tile.rows.begin;
  int const group_last = p.positions[min(group_end - 1, last_row)];
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

  waitForCopiesBut<1>();
  __syncwarp();
  products.takeQueries();
  int split_end = splitBegin(1);
  for (int index = 0; index < num_tiles; ++index) {
    int const first_key = index * kTileKeys;
    waitForCopiesBut<0>();
    products.showTile();
    __syncthreads();
    char* const key_tile = stages + index % kStages * 2 * kTileBytes;
    char* const value_tile = key_tile + kTileBytes;
    bool const has_work = first_key <= group_last;
    float scores[8][4];
    if (has_work) products.startScores(scores, sharedAddress(key_tile));
    copyTile(index + 1);
    if (thread < kTileKeys) {
      int const key = first_key + 2 * kTileKeys + thread;
      sources[index % 2][thread] = sourceOf(args, pool, lookup, upcoming, key);
      upcoming = findEntry(key + kTileKeys);
    }
    if (hasOwn(index + 1) && place_key < kTileKeys) {
      places[(index + 1) % 2][place_key] = findPlace(first_key + kTileKeys + place_key);
    }
    if (hasOwn(index)) storeTile(index, key_tile);
    uint2 found = make_uint2(0, 0);
    if (first_key + kTileKeys - 1 > block_first) {
      uint32_t* const noted = non_finite[index % 2];
      removeNonFinite<T, Layout>(value_tile, noted, thread, kThreads);
      if (thread < 2) non_finite[(index + 1) % 2][thread] = 0;
      products.showTile();
      __syncthreads();
      found = make_uint2(noted[0], noted[1]);
    }
    products.finishScores(scores);
    if (first_key == split_end) {
      foldSplit();
      ++split;
      split_end = splitBegin(split + 1);
    }
    if (!has_work) continue;

    if (first_key + kTileKeys - 1 > warp_first) hideKeys(scores, first_key, positions);
    float const fade[2] = {weigh(scores, state, args.scale, 0),
                           weigh(scores, state, args.scale, 1)};
    fadeSums(sums, fade);
    products.addValues(sums, scores, sharedAddress(value_tile));
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

template <typename T, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, ProductsOfAWarp<T, kHeadDim>::kBlocksAnSm)
    prefillAttentionKernel(AttentionArgs const args) {
  attendPrefill<T, kHeadDim, kWarps, ProductsOfAWarp<T, kHeadDim>>(args);
}

template <typename T, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, ProductsOfAGroup<T, kHeadDim>::kBlocksAnSm)
    prefillAttentionByGroupsKernel(AttentionArgs const args) {
  static_assert(kWarps * kRowsAWarp % ProductsOfAGroup<T, kHeadDim>::kRows == 0);
#ifdef LOOPTRT_HAS_WARPGROUPS
  attendPrefill<T, kHeadDim, kWarps, ProductsOfAGroup<T, kHeadDim>>(args);
#else
  __trap();  // hasWarpgroups says no
#endif
}

template <typename Products, int kHeadDim, int kWarps>
constexpr int kBlockBytes =
    2 * kStages * Products::kTileBytes + Products::kAlignment +
    kWarps * (kTotalBytes<kHeadDim> + (Products::kKeepsQueries ? Products::kWarpBytes : 0));

// Whether the kernel's machine code at hand is that of sm_90a: elsewhere, and in PTX that a driver
// translated, its body is a trap, without the variables of the real one.
template <typename Kernel>
cudaError_t hasWarpgroups(Kernel* kernel, bool& has) {
  cudaFuncAttributes attributes{};
  cudaError_t const error = cudaFuncGetAttributes(&attributes, kernel);
  has = attributes.sharedSizeBytes >= sizeof(KeySource) * 2 * kTileKeys;
  return error;
}

int64_t mostTiles(AttentionArgs const& args, int rows_a_tile) {
  return args.p.num_rows / rows_a_tile + args.p.num_sequences;
}

// Whether a block has enough shared memory, and there are so many that every multiprocessor gets
// blocks_an_sm. Of the sequences, which the host does not know, it takes all but one for decoded.
template <typename Products, int kHeadDim, int kWarps>
bool isEnough(AttentionArgs const& args, int blocks_an_sm = 1) {
  int64_t const tiles = args.p.num_rows / (kWarps * kRowsAWarp) + 1;
  return kBlockBytes<Products, kHeadDim, kWarps> + kStaticBytes <= args.shared_bytes &&
         tiles * args.p.num_heads >= int64_t{blocks_an_sm} * args.num_sms;
}

template <typename Products, int kHeadDim, int kWarps>
cudaError_t launch(void (*kernel)(AttentionArgs), AttentionArgs const& args, cudaStream_t stream) {
  constexpr int kBytes = kBlockBytes<Products, kHeadDim, kWarps>;
  int64_t const tiles = mostTiles(args, kWarps * kRowsAWarp);
  if (kBytes + kStaticBytes > args.shared_bytes) return cudaErrorInvalidConfiguration;
  if (tiles > 65535) return cudaErrorInvalidValue;
  if (cudaError_t error = prepareShared(kernel, kBytes); error != cudaSuccess) return error;
  dim3 const grid(args.p.num_heads, tiles);
  return launchKernel(kernel, grid, kWarps * 32, stream, args, kBytes, Start::kOverlapping);
}

// With the first number of warps whose block has enough shared memory and of which there are enough
// blocks that no multiprocessor is left without one; else with the last.
template <typename T, int kHeadDim, int kWarps, int... kFewerWarps>
cudaError_t launchByWarps(AttentionArgs const& args, cudaStream_t stream) {
  using Products = ProductsOfAWarp<T, kHeadDim>;
  if constexpr (sizeof...(kFewerWarps) > 0) {
    if (!isEnough<Products, kHeadDim, kWarps>(args)) {
      return launchByWarps<T, kHeadDim, kFewerWarps...>(args, stream);
    }
  }
  return launch<Products, kHeadDim, kWarps>(prefillAttentionKernel<T, kHeadDim, kWarps>, args,
                                            stream);
}

}  // namespace

cudaError_t launchPrefillAttention(AttentionArgs const& args, cudaStream_t stream) {
  return dispatchTensorCores(args.p, [&](auto tag, auto head_dim) {
    using T = typename decltype(tag)::Type;
    constexpr int kHeadDim = decltype(head_dim)::value;
    if constexpr (kHeadDim != 64) {  // where single warps are faster
      using Products = ProductsOfAGroup<T, kHeadDim>;
      auto* const kernel = prefillAttentionByGroupsKernel<T, kHeadDim, 12>;
      bool has_warpgroups = false;
      if (isEnough<Products, kHeadDim, 8>(args)) {
        if (cudaError_t error = hasWarpgroups(kernel, has_warpgroups); error != cudaSuccess) {
          return error;
        }
      }
      // Three groups are faster than two where there are many blocks. Where some multiprocessors
      // would get two of them and others one, smaller ones are shared out better.
      if (has_warpgroups && isEnough<Products, kHeadDim, 12>(args, 2)) {
        return launch<Products, kHeadDim, 12>(kernel, args, stream);
      }
      if (has_warpgroups) {
        return launch<Products, kHeadDim, 8>(prefillAttentionByGroupsKernel<T, kHeadDim, 8>, args,
                                             stream);
      }
    }
    // Warps of a block, as many as registers and shared memory have place for. At 64 channels they
    // hold several small blocks, of which others work while one waits at a barrier: measured faster
    // there, slower at more. 12 warps are faster at 96 channels, 8 at 128; 3 fit in 99 KiB.
    if constexpr (kHeadDim == 64) return launchByWarps<T, kHeadDim, 4>(args, stream);
    if constexpr (kHeadDim == 96) return launchByWarps<T, kHeadDim, 12, 8, 4>(args, stream);
    if constexpr (kHeadDim == 128) return launchByWarps<T, kHeadDim, 8, 4, 3>(args, stream);
  });
}

}  // namespace looptrt
