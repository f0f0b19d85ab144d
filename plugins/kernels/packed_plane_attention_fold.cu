#include <cuda_runtime.h>

#include "looptrt/vec.cuh"
#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_partials.cuh"
#include "packed_plane_attention_tile.cuh"

namespace looptrt {
namespace {

// What the kernel is launched with.
struct FoldArgs {
  AttentionArgs call;
  Partials partials;
};

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
        args.hasPartialOfEveryRow() ? sequenceOf(args, row) : partial_row / args.few_rows;
    if (sequence == args.p.num_sequences) return {0, 0};
    RowRange const rows = rowsOf(args, sequence);
    if (!args.hasPartialOfEveryRow()) row = rows.begin + partial_row % args.few_rows;
    if (row >= rows.end || !hasFewRows(args, rows.end - rows.begin)) return {0, 0};
  }
  int const last_split = splitOf(clampPosition(args, args.p.positions[row]));
  return {row, last_split == 0 ? 0 : last_split + 1};
}

// Folds a row's splits, in order. Grid: x partial rows, y heads; a thread for two channels.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim / 2) foldSplitsKernel(FoldArgs const fold_args) {
  constexpr int kAtOnce = 16;   // partial results asked for before the first is used
  constexpr int kTogether = 8;  // of them, folded without a branch
  AttentionArgs const& args = fold_args.call;
  int const head = blockIdx.y;
  int64_t const place = partialIndex(args, blockIdx.x, head);
  float const* const values = fold_args.partials.values + place * kHeadDim + 2 * threadIdx.x;
  float2 const* const summary = fold_args.partials.summary + place;
  // Operands may be read before the decode kernel ends: it let this one start, in every block,
  // only after it had waited for them. All threads wait all the same, for those who wait for this.
  auto const [row, num_splits] = foldedRow(args, blockIdx.x);
  float top = negativeInfinity();
  float sum = 0.0f;
  float2 total = make_float2(0.0f, 0.0f);
  int begin = 0;
  waitForInputs();
  do {  // without a branch from the wait to the first loads
    float2 state[kAtOnce];
    float2 split[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      state[i] = make_float2(negativeInfinity(), 0.0f);
      if (begin + i < num_splits) state[i] = summary[begin + i];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i < num_splits) {
        split[i] = *reinterpret_cast<float2 const*>(values + int64_t{begin + i} * kHeadDim);
      }
    }
    __syncwarp();  // for the compiler, which else asks for them one by one to save registers
#pragma unroll
    for (int first = 0; first < kAtOnce; first += kTogether) {
      if (begin + first >= num_splits) break;
#pragma unroll
      for (int i = first; i < first + kTogether; ++i) {
        Fold const fold(top, state[i].x);  // of tops alone, not of the sums before
        top = fold.top;
        bool const is_split = begin + i < num_splits;  // by selection: a fold may turn -0 to 0
        sum = is_split ? fold(sum, state[i].y) : sum;
        total.x = is_split ? fold(total.x, split[i].x) : total.x;
        total.y = is_split ? fold(total.y, split[i].y) : total.y;
      }
    }
    begin += kAtOnce;
  } while (begin < num_splits);
  if (num_splits == 0) return;
  Normalise const normalise(sum);
  T* const to = static_cast<T*>(args.p.attended) + (row * args.p.num_heads + head) * kHeadDim;
  *reinterpret_cast<uint32_t*>(to + 2 * threadIdx.x) =
      Packed<T>::roundTo(normalise(total.x), normalise(total.y));
}

template <typename T, int kHeadDim>
cudaError_t launch(AttentionArgs const& args, cudaStream_t stream) {
  auto* const kernel = foldSplitsKernel<T, kHeadDim>;
  if (cudaError_t error = prepareShared(kernel, 0); error != cudaSuccess) return error;
  return launchKernel(kernel, dim3(args.partialRows(), args.p.num_heads), kHeadDim / 2, stream,
                      FoldArgs{args, Partials(args)}, 0, Start::kOverlapping);
}

}  // namespace

cudaError_t launchSplitFold(AttentionArgs const& args, cudaStream_t stream) {
  return dispatchTensorCores(args.p, [&](auto tag, auto head_dim) {
    return launch<typename decltype(tag)::Type, decltype(head_dim)::value>(args, stream);
  });
}

}  // namespace looptrt
