#include <cuda_runtime.h>

#include "looptrt/vec.cuh"
#include "packed_plane_attention_forms.cuh"
#include "packed_plane_attention_partials.cuh"
#include "packed_plane_attention_tile.cuh"

namespace looptrt {
namespace {

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
  return {row, splitOf(clampPosition(args, args.p.positions[row])) + 1};
}

// Folds a row's splits, in order. Grid: x partial rows, y heads; a thread for two channels.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim / 2) foldSplitsKernel(AttentionArgs const args) {
  constexpr int kAtOnce = 16;  // partial results asked for before the first is used
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
  auto* const kernel = foldSplitsKernel<T, kHeadDim>;
  if (cudaError_t error = prepareShared(kernel, 0); error != cudaSuccess) return error;
  return launchKernel(kernel, dim3(args.partialRows(), args.p.num_heads), kHeadDim / 2, stream,
                      args, 0, Start::kOverlapping);
}

}  // namespace

cudaError_t launchSplitFold(AttentionArgs const& args, cudaStream_t stream) {
  return dispatchTensorCores(args.p, [&](auto tag, auto head_dim) {
    return launch<typename decltype(tag)::Type, decltype(head_dim)::value>(args, stream);
  });
}

}  // namespace looptrt
