#include <cuda_runtime.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/mma.cuh"
#include "looptrt/vec.cuh"
#include "skinny_linear.cuh"

namespace looptrt {
namespace {

// A tile of kTile outputs is a sum over pieces of kPiece inputs. Piece i belongs to warp
// i % kWarps, which takes its pieces in order; then the warps' sums are added in order. These
// three constants fix bits.
constexpr int kWarps = 8;
constexpr int kPiece = 64;
constexpr int kTile = 8;

constexpr int kBlock = kWarps * 32;
constexpr int kVec = 8;                          // elements of 16 bytes
constexpr int kPieceBytes = kTile * kPiece * 2;  // of weight, on their way to one warp

constexpr int kUnroll = 4;      // pieces of a warp between shared memory and its sums
constexpr int kFoldTiles = 2;   // tiles whose sums are folded at once
constexpr int kStageBatch = 8;  // vectors of x that a thread reads before it writes one

constexpr int kInTurnInputs = 1024;  // rows of so many inputs, or a multiple, are 2 KiB apart

// Pieces on their way to each warp.
constexpr int kDeepest = 12;
constexpr int kShallowest = 6;
template <int kDepth>
constexpr int kFifoBytes = kWarps * kDepth * kPieceBytes;
template <int kDepth>
using Depth = std::integral_constant<int, kDepth>;
constexpr int kReservedBytes = 1024;  // of shared memory, by the system, a block

// Tiles of block b: tiles_per_block of them, from b * first_step on, `step` apart.
struct SkinnyArgs {
  SkinnyLinearParams p;
  int32_t tiles, pieces;
  int32_t tiles_per_block, first_step, step;
};

// Copies 16 bytes to shared memory, or zeros; fetches the rest of their cache line as well, which
// the same warp reads next (measured: 1 % of a decode step).
__device__ __forceinline__ void copyAsync16OrZero(uint32_t shared, void const* global,
                                                  bool is_valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(is_valid ? 16 : 0)
               : "memory");
}

// Of the sums that a block's warps leave each other, for two folds.
template <bool kIsTall>
constexpr int kPartialBytes = 2 * kFoldTiles * kWarps * (kIsTall ? 16 : 8) * kTile * 4;

// A thread's weights or activations of one piece: two vectors, kPiece / 2 elements apart.
struct PieceRow {
  uint4 halves[2];
};

// Weights of a warp's pieces, in the order in which it uses them. A thread reads back what it
// copied itself, so the warp needs no barrier.
template <typename T, int kDepth>
class WeightStream {
 public:
  __device__ __forceinline__ WeightStream(SkinnyArgs const& args, int num_tiles, uint4* shared)
      : inputs_(args.p.inputs),
        outputs_(args.p.outputs),
        warp_(threadIdx.x / 32),
        offset_(threadIdx.x % 4 * kVec),
        pieces_(args.pieces),
        piece_(warp_),
        row_(threadIdx.x % 32 / 4),
        tile_(blockIdx.x * args.first_step),
        step_(args.step),
        left_(num_tiles),
        weight_(static_cast<T const*>(args.p.weight)),
        slots_(shared + warp_ * kDepth * (kPieceBytes / 16) + threadIdx.x % 32) {
    if (piece_ >= pieces_) left_ = 0;  // fewer pieces than warps
  }

  // Asks for the next piece; counts as asked for past the last one too.
  __device__ __forceinline__ void ask() {
    if (left_ > 0) {
      int const output = tile_ * kTile + row_;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const input = piece_ * kPiece + half * (kPiece / 2) + offset_;
        bool const is_valid = input < inputs_ && output < outputs_;
        T const* from = weight_ + (is_valid ? int64_t{output} * inputs_ + input : 0);
        copyAsync16OrZero(sharedAddress(slots_ + (asked_ * 2 + half) * 32), from, is_valid);
      }
      piece_ += kWarps;
      if (piece_ >= pieces_) {
        piece_ = warp_;
        tile_ += step_;
        --left_;
      }
    }
    commitCopies();
    asked_ = asked_ + 1 == kDepth ? 0 : asked_ + 1;
  }

  // The oldest piece asked for and not yet taken; its place is free for the next ask().
  __device__ __forceinline__ PieceRow take() {
    waitForCopiesBut<kDepth - 1>();
    PieceRow const row{{slots_[taken_ * 2 * 32], slots_[(taken_ * 2 + 1) * 32]}};
    taken_ = taken_ + 1 == kDepth ? 0 : taken_ + 1;
    return row;
  }

 private:
  int inputs_, outputs_, warp_, offset_, pieces_, piece_, row_, tile_, step_, left_;
  T const* weight_;
  uint4* slots_;
  int asked_ = 0;
  int taken_ = 0;
};

// Where a warp finds its rows of x: in shared memory where they fit, else in global memory.
template <typename T>
struct Inputs {
  T const* x;
  int64_t stride;  // elements from row to row
  int num_rows, inputs;

  // Two vectors of row `row` in a piece; zeros outside x.
  __device__ __forceinline__ PieceRow piece(int row, int index) const {
    PieceRow loaded;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const input = index * kPiece + half * (kPiece / 2) + threadIdx.x % 4 * kVec;
      loaded.halves[half] = make_uint4(0, 0, 0, 0);
      if (row < num_rows && input < inputs) {
        loaded.halves[half] = *reinterpret_cast<uint4 const*>(x + row * stride + input);
      }
    }
    return loaded;
  }
};

// Sums of a tile that one warp makes: four that it adds up at the tile's end.
template <typename T>
struct TileSum {
  float sums[4][4] = {};

  // low and high: rows g and, where there are so many, g + 8 of x.
  __device__ __forceinline__ void add(PieceRow const& x_low, PieceRow const& x_high,
                                      PieceRow const& weight) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 const w = weight.halves[half];
      uint4 const low = x_low.halves[half];
      uint4 const high = x_high.halves[half];
      multiplyAdd<T>(sums[2 * half], {low.x, high.x, low.y, high.y}, w.x, w.y);
      multiplyAdd<T>(sums[2 * half + 1], {low.z, high.z, low.w, high.w}, w.z, w.w);
    }
  }
  // of element i of an accumulator (mma.cuh).
  __device__ __forceinline__ float total(int i) const {
    return addRn(addRn(sums[0][i], sums[1][i]), addRn(sums[2][i], sums[3][i]));
  }
};

// Elements from row to row of x in shared memory: the rows that a warp reads at once lie in
// different banks.
__host__ __device__ __forceinline__ int64_t stagedStride(int inputs) {
  return (inputs + 2 * kPiece - 1) / (2 * kPiece) * (2 * kPiece) + kPiece / 2;
}

// Grid: at most a block a multiprocessor.
template <typename T, int kDepth, bool kIsTall, bool kIsStaged>
__global__ void __launch_bounds__(kBlock, 2) skinnyLinearKernel(SkinnyArgs const args) {
  constexpr int kRows = kIsTall ? 16 : 8;
  extern __shared__ uint4 fifo[];
  __shared__ float partial[2][kFoldTiles][kWarps][kRows][kTile];
  static_assert(sizeof(partial) == kPartialBytes<kIsTall>);
  SkinnyLinearParams const& p = args.p;
  int const warp = threadIdx.x / 32;
  int const first_tile = blockIdx.x * args.first_step;
  int const num_tiles =
      min(args.tiles_per_block,
          static_cast<int>((args.tiles - first_tile + args.step - 1) / args.step));
  letNextStart();
  WeightStream<T, kDepth> weights(args, num_tiles, fifo);
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) weights.ask();
  waitForInputs();

  Inputs<T> in{static_cast<T const*>(p.x), p.inputs, static_cast<int>(p.num_rows), p.inputs};
  if constexpr (kIsStaged) {
    auto* staged = reinterpret_cast<T*>(fifo + kFifoBytes<kDepth> / 16);
    int64_t const stride = stagedStride(p.inputs);
    int const vectors = p.inputs / kVec;
    int const total = vectors * in.num_rows;
    for (int begin = threadIdx.x; begin < total; begin += kStageBatch * kBlock) {
      Vec<T, kVec> batch[kStageBatch];
#pragma unroll
      for (int i = 0; i < kStageBatch; ++i) {
        int const vec = begin + i * kBlock;
        if (vec < total) batch[i] = loadVec<T, kVec>(in.x + int64_t{vec} * kVec);
      }
#pragma unroll
      for (int i = 0; i < kStageBatch; ++i) {
        int const vec = begin + i * kBlock;
        int const row = vec / vectors;
        if (vec < total) storeVec(staged + row * stride + (vec - row * vectors) * kVec, batch[i]);
      }
    }
    in.x = staged;
    in.stride = stride;
    __syncthreads();
  }
  int slot = 0;
  int buffer = 0;
  for (int i = 0; i < num_tiles; ++i) {
    TileSum<T> sum;
#pragma unroll kUnroll
    for (int piece = warp; piece < args.pieces; piece += kWarps) {
      int const row = threadIdx.x % 32 / 4;
      PieceRow const low = in.piece(row, piece);
      PieceRow const high = kIsTall ? in.piece(row + 8, piece) : PieceRow{};
      PieceRow const weight = weights.take();
      weights.ask();
      sum.add(low, high, weight);
    }
    // Thread (g, t) has outputs 2t and 2t + 1 of row g, and of row g + 8.
    int const row = threadIdx.x % 32 / 4;
    int const output = threadIdx.x % 4 * 2;
    partial[buffer][slot][warp][row][output] = sum.total(0);
    partial[buffer][slot][warp][row][output + 1] = sum.total(1);
    if constexpr (kIsTall) {
      partial[buffer][slot][warp][row + 8][output] = sum.total(2);
      partial[buffer][slot][warp][row + 8][output + 1] = sum.total(3);
    }
    ++slot;
    if (slot < kFoldTiles && i + 1 < num_tiles) continue;
    __syncthreads();
    int const folded_tile = first_tile + (i + 1 - slot) * args.step;
    for (int j = threadIdx.x; j < slot * kTile * in.num_rows; j += kBlock) {
      int const column = j % kTile;
      int const folded = j / kTile % slot;
      int const of_row = j / kTile / slot;
      float total = partial[buffer][folded][0][of_row][column];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        total = addRn(total, partial[buffer][folded][w][of_row][column]);
      }
      int const y_column = (folded_tile + folded * args.step) * kTile + column;
      if (y_column < p.outputs) {
        static_cast<T*>(p.y)[int64_t{of_row} * p.outputs + y_column] = roundTo<T>(total);
      }
    }
    slot = 0;
    buffer ^= 1;  // the next barrier comes before this buffer's next use
  }
}

// Any alignment and dtype: a warp an output, lane i with inputs i, i + 32, ...
template <typename T>
__global__ void __launch_bounds__(kBlock) plainLinearKernel(SkinnyLinearParams const p) {
  int64_t const output = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  letNextStart();
  waitForInputs();
  if (output >= p.outputs) return;
  T const* weight = static_cast<T const*>(p.weight) + output * p.inputs;
  T const* x = static_cast<T const*>(p.x) + int64_t{blockIdx.y} * p.inputs;
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < p.inputs; i += 32) {
    sum = fmaf(toFloat(x[i]), toFloat(weight[i]), sum);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum = addRn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
  }
  if (threadIdx.x % 32 == 0) {
    static_cast<T*>(p.y)[int64_t{blockIdx.y} * p.outputs + output] = roundTo<T>(sum);
  }
}

template <typename T, int kDepth, bool kIsTall, bool kIsStaged>
cudaError_t launchStreamed(SkinnyLinearParams const& p, int num_sms, int shared_bytes,
                           int staged_bytes, cudaStream_t stream) {
  auto* const kernel = skinnyLinearKernel<T, kDepth, kIsTall, kIsStaged>;
  int const bytes = kFifoBytes<kDepth> + (kIsStaged ? staged_bytes : 0);
  // Both are the same for every size: a graph's kernels keep what they were captured with, and a
  // multiprocessor must be idle to divide its memory anew.
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               shared_bytes - kPartialBytes<kIsTall>);
      error != cudaSuccess) {
    return error;
  }
  if (cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      error != cudaSuccess) {
    return error;
  }
  SkinnyArgs args{};
  args.p = p;
  args.tiles = ceilDiv(p.outputs, kTile);
  args.pieces = ceilDiv(p.inputs, kPiece);
  int grid = std::min(args.tiles, num_sms);
  args.tiles_per_block = ceilDiv(args.tiles, grid);
  // Blocks have stretches of tiles, or where those would all lie at multiples of a large power of
  // two, take tiles in turn. Measured on an H200: 11264 x 2048 takes 13.3 us in turn, 16.5 in
  // stretches; 35840 x 5280 takes 109.6 and 93.2.
  if (p.inputs % kInTurnInputs == 0) {
    args.first_step = 1;
    args.step = grid;
  } else {
    grid = ceilDiv(args.tiles, args.tiles_per_block);
    args.first_step = args.tiles_per_block;
    args.step = 1;
  }
  return launchKernel(kernel, dim3(grid), kBlock, stream, args, bytes, Start::kOverlapping);
}

template <typename T, bool kIsTall>
cudaError_t launchRows(SkinnyLinearParams const& p, cudaStream_t stream) {
  int device = 0;
  int num_sms = 0;
  int shared_bytes = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  if (cudaError_t error =
          cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      error != cudaSuccess) {
    return error;
  }
  int64_t const staged_bytes = p.num_rows * stagedStride(p.inputs) * int64_t{sizeof(T)};
  int64_t const beside_fifo = kPartialBytes<kIsTall> + staged_bytes;
  auto const tryDepth = [&](auto depth, int64_t limit) -> std::optional<cudaError_t> {
    if (beside_fifo + kFifoBytes<depth> > limit) return std::nullopt;
    return launchStreamed<T, depth, kIsTall, true>(p, num_sms, shared_bytes, staged_bytes, stream);
  };
  // The deepest FIFO that leaves room for the next product's block, else the deepest that fits.
  int64_t const half = shared_bytes / 2 - kReservedBytes;
  if (auto status = tryDepth(Depth<kDeepest>{}, half)) return *status;
  if (auto status = tryDepth(Depth<10>{}, half)) return *status;
  if (auto status = tryDepth(Depth<8>{}, half)) return *status;
  if (auto status = tryDepth(Depth<kShallowest>{}, half)) return *status;
  if (auto status = tryDepth(Depth<kDeepest>{}, shared_bytes)) return *status;
  if (auto status = tryDepth(Depth<kShallowest>{}, shared_bytes)) return *status;
  return launchStreamed<T, kShallowest, kIsTall, false>(p, num_sms, shared_bytes, 0, stream);
}

}  // namespace

cudaError_t launchSkinnyLinear(SkinnyLinearParams const& p, cudaStream_t stream) {
  if (p.num_rows < 0 || p.num_rows > kMaxSkinnyRows || p.outputs < 1 || p.inputs < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.num_rows == 0) return cudaSuccess;
  return dispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if constexpr (sizeof(T) == 2) {
      if (p.inputs % kVec == 0 && areAligned(16, p.x, p.weight)) {
        return p.num_rows > 8 ? launchRows<T, true>(p, stream) : launchRows<T, false>(p, stream);
      }
    }
    dim3 const grid(ceilDiv(p.outputs, kWarps), p.num_rows);
    return launchKernel(plainLinearKernel<T>, grid, kBlock, stream, p, 0, Start::kOverlapping);
  });
}

}  // namespace looptrt
