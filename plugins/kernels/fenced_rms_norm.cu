#include <cuda_runtime.h>

#include <algorithm>

#include "fenced_rms_norm.cuh"
#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/row_sum.cuh"
#include "looptrt/vec.cuh"

namespace looptrt {
namespace {

constexpr int kMinBlock = 128;               // rows of few threads share a block of this many
constexpr int kMaxRowBytes = 48 * 1024;      // two rows fit in the shared memory of every GPU
constexpr int kFreeSharedBytes = 48 * 1024;  // what a kernel gets without asking
constexpr int kShortVectors = 4;             // a thread holds this many vectors in registers
constexpr int kLongBatch = 4;                // vectors a thread reads before it writes one
constexpr int kFewThreads = 128;             // of a row on fencedRmsNormOfFewKernel
constexpr int kMinFewPlan = 64;              // threads of a plan there
constexpr int kFewHidden = 2048;             // widths up to each multiple have their own kernel
constexpr int kMaxFewHidden = 3 * kFewHidden;
constexpr int kLine = 128;  // bytes
constexpr int kSumBytes = kSumSlots * static_cast<int>(sizeof(float));

template <typename T>
using V = Vec<T, kSumLanes>;

// How a thread holds its part of a row, the vectors that it sums. Small kernels are fast at one
// row, where fetching instructions is much of the time.
enum class Layout {
  kNarrow,  // one vector, of elements `threads` apart
  kSingle,  // one vector
  kShort,   // at most kShortVectors vectors in registers, weights loaded before the sum
  kLong,    // any number, waiting in shared memory, where each thread touches its own part only
  kFew,     // a row on fencedRmsNormOfFewKernel
  kChains,  // a warp's row, its running sums one a thread of fencedRmsNormByChainsKernel
};

template <Layout kLayout>
constexpr int kBatch = kLayout == Layout::kShort  ? kShortVectors
                       : kLayout == Layout::kLong ? kLongBatch
                                                  : 1;

// rows_shift: log2 of the rows of a block.
struct NormArgs {
  FencedRmsNormParams p;
  RowSumPlan plan;
  int32_t rows_shift;
  bool overlaps;  // the kernel may start before its inputs are there
};

// A thread's part of its row: vectors `step` elements apart, in the order in which it sums them.
template <typename T, Layout kLayout>
struct Part {
  int thread;  // within the row
  int first;   // element
  int step;
  int hidden;

  __device__ __forceinline__ Part(int thread_of_row, NormArgs const& args)
      : thread(thread_of_row),
        first(thread_of_row * kSumLanes),
        step(args.plan.threads * kSumLanes),
        hidden(args.p.hidden) {}

  // Elements past the end of a narrow row read as 0, which adds nothing to a sum of squares.
  __device__ __forceinline__ V<T> load(T const* row, int offset) const {
    if constexpr (kLayout != Layout::kNarrow) return loadVec<T, kSumLanes>(row + offset);
    V<T> vec{};
#pragma unroll
    for (int c = 0; c < kSumLanes; ++c) {
      int const element = thread + c * step / kSumLanes;
      if (element < hidden) vec[c] = row[element];
    }
    return vec;
  }
  __device__ __forceinline__ void store(T* row, int offset, V<T> const& vec) const {
    if constexpr (kLayout != Layout::kNarrow) {
      storeVec(row + offset, vec);
    } else {
#pragma unroll
      for (int c = 0; c < kSumLanes; ++c) {
        int const element = thread + c * step / kSumLanes;
        if (element < hidden) row[element] = vec[c];
      }
    }
  }
  // Calls load(slot, offset) for a batch of vectors, then use(slot, offset): reads before writes,
  // since the compiler must not move a read over a write.
  template <typename Load, typename Use>
  __device__ __forceinline__ void forEach(Load&& load, Use&& use) const {
    constexpr int kCount = kBatch<kLayout>;
    if constexpr (kLayout == Layout::kLong) {
      int offset = first;
#pragma unroll 1
      for (; offset + (kCount - 1) * step < hidden; offset += kCount * step) {
#pragma unroll
        for (int slot = 0; slot < kCount; ++slot) load(slot, offset + slot * step);
#pragma unroll
        for (int slot = 0; slot < kCount; ++slot) use(slot, offset + slot * step);
      }
#pragma unroll 1
      for (; offset < hidden; offset += step) {
        load(0, offset);
        use(0, offset);
      }
    } else {
#pragma unroll
      for (int slot = 0; slot < kCount; ++slot) {
        if (slot == 0 || first + slot * step < hidden) load(slot, first + slot * step);
      }
#pragma unroll
      for (int slot = 0; slot < kCount; ++slot) {
        if (slot == 0 || first + slot * step < hidden) use(slot, first + slot * step);
      }
    }
  }
};

// A thread's part of a row that it needs again: in registers, or on its way to shared memory.
template <typename T, Layout kLayout>
class Held {
 public:
  __device__ __forceinline__ Held(Part<T, kLayout> const& part, T* shared)
      : part_(part), shared_(shared) {}

  __device__ __forceinline__ void fill(T const* row) {
    if constexpr (kLayout == Layout::kLong) {
      for (int offset = part_.first; offset < part_.hidden; offset += part_.step) {
        copyVecAsync<T, kSumLanes>(shared_ + offset, row + offset);
      }
    } else {
      part_.forEach([&](int slot, int offset) { registers_[slot] = part_.load(row, offset); },
                    [](int, int) {});
    }
  }
  __device__ __forceinline__ V<T> get(int slot, int offset) const {
    if constexpr (kLayout == Layout::kLong) return part_.load(shared_, offset);
    return registers_[slot];
  }
  __device__ __forceinline__ void set(int slot, int offset, V<T> const& vec) {
    if constexpr (kLayout == Layout::kLong) {
      part_.store(shared_, offset, vec);
    } else {
      registers_[slot] = vec;
    }
  }

 private:
  Part<T, kLayout> const& part_;
  T* shared_;
  V<T> registers_[kBatch<kLayout>];
};

// A thread's part of a weight: loaded early into registers, or where it is used.
template <typename T, Layout kLayout>
class Weight {
 public:
  __device__ __forceinline__ Weight(Part<T, kLayout> const& part, void const* row)
      : part_(part), row_(static_cast<T const*>(row)) {}

  __device__ __forceinline__ void fill() {
    if constexpr (kLayout != Layout::kLong) {
      part_.forEach([&](int slot, int offset) { registers_[slot] = part_.load(row_, offset); },
                    [](int, int) {});
    }
  }
  __device__ __forceinline__ V<T> get(int slot, int offset) const {
    if constexpr (kLayout == Layout::kLong) return part_.load(row_, offset);
    return registers_[slot];
  }

 private:
  Part<T, kLayout> const& part_;
  T const* row_;
  V<T> registers_[kBatch<kLayout>];
};

// Sum of squares of one row in PyTorch's order: x.float().pow(2).mean(-1).
// kLanes: running sums of a thread of the plan that this thread has, all four or, in pairs of
// threads, two.
template <int kLanes>
struct SquareSum {
  static_assert(kLanes == kSumLanes || 2 * kLanes == kSumLanes);
  float sums[kLanes] = {};

  SquareSum() = default;
  // Of the first vector: 0 plus a square is the square.
  __device__ __forceinline__ explicit SquareSum(Vec<float, kLanes> const& x) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) sums[c] = mulRn(x[c], x[c]);
  }
  __device__ __forceinline__ void take(Vec<float, kLanes> const& x) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) sums[c] = addRn(sums[c], mulRn(x[c], x[c]));
  }
  // In every thread, or in the first of each pair.
  __device__ __forceinline__ float total() const {
    float sum = sums[0];
#pragma unroll
    for (int c = 1; c < kLanes; ++c) sum = addRn(sum, sums[c]);
    if constexpr (kLanes < kSumLanes) {
#pragma unroll
      for (int c = 0; c < kLanes; ++c) sum = addRn(sum, __shfl_down_sync(0xffffffffu, sums[c], 1));
    }
    return sum;
  }
  // 1 / sqrt(mean + eps), in every thread of the row.
  __device__ __forceinline__ float inverseRms(RowSumPlan const& plan, float eps,
                                              float* shared) const {
    float const own = total();
    float const sum = plan.threads <= kWarp ? sumInWarp(own, plan) : sumInBlock(own, plan, shared);
    return rsqrtf(addRn(mulRn(sum, plan.factor), eps));
  }
};

// x * inverse rounded to T, then times weight rounded to T.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> scale(Vec<T, kSize> const& x, float inverse,
                                               Vec<T, kSize> const& weight) {
  Vec<float, kSize> scaled;
#pragma unroll
  for (int c = 0; c < kSize; ++c) scaled[c] = mulRn(toFloat(x[c]), inverse);
  return mulVec(roundVec<T>(scaled), weight);
}

// Neighbours of 16 bits, two a word. As Vec<T, 2 * kWords>, of which the compiler takes each
// element apart, a vector that may be absent costs twice the instructions.
template <int kWords>
using Words = Vec<uint32_t, kWords>;

template <typename T, int kWords>
__device__ __forceinline__ Vec<float, 2 * kWords> toFloats(Words<kWords> const& words) {
  Vec<float, 2 * kWords> wide;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    wide[2 * i] = Packed<T>::low(words[i]);
    wide[2 * i + 1] = Packed<T>::high(words[i]);
  }
  return wide;
}

// The operators of fence.cuh.
template <typename T, int kWords>
__device__ __forceinline__ Words<kWords> addWords(Words<kWords> const& a, Words<kWords> const& b) {
  auto const x = toFloats<T>(a);
  auto const y = toFloats<T>(b);
  Words<kWords> sum;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    sum[i] = Packed<T>::roundTo(addRn(x[2 * i], y[2 * i]), addRn(x[2 * i + 1], y[2 * i + 1]));
  }
  return sum;
}
// As addWords, wide again.
template <typename T, int kWords>
__device__ __forceinline__ Vec<float, 2 * kWords> addWide(Words<kWords> const& a,
                                                          Words<kWords> const& b) {
  auto const x = toFloats<T>(a);
  auto const y = toFloats<T>(b);
  Vec<float, 2 * kWords> sum;
#pragma unroll
  for (int c = 0; c < 2 * kWords; ++c) sum[c] = Packed<T>::rounded(addRn(x[c], y[c]));
  return sum;
}
template <typename T, int kWords>
__device__ __forceinline__ Words<kWords> scaleWords(Vec<float, 2 * kWords> const& x, float inverse,
                                                    Words<kWords> const& weight) {
  Words<kWords> scaled;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    scaled[i] = Packed<T>::roundTo(mulRn(x[2 * i], inverse), mulRn(x[2 * i + 1], inverse));
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) scaled[i] = Packed<T>::mul(scaled[i], weight[i]);
  return scaled;
}

template <NormForm kForm>
constexpr bool kAddsFirst = kForm == NormForm::kAddNorm || kForm == NormForm::kAddNormNorm;

template <NormForm kForm>
constexpr bool kHasResidual = kForm != NormForm::kNorm && kForm != NormForm::kQkNorm;

template <NormForm kForm>
constexpr bool kHasTwoNorms = kForm == NormForm::kNormAddNorm || kForm == NormForm::kAddNormNorm;

// The row of a block that kNorm works on, or that of q, k or v in kQkNorm: blocks 0, 1 and 2 in y.
template <typename T, NormForm kForm>
struct RowOf {
  T* y;
  T const* x;
  T const* weight;
  bool is_copied;

  __device__ __forceinline__ RowOf(FencedRmsNormParams const& p, int64_t row)
      : y(static_cast<T*>(p.y) + row * p.row_stride),
        x(static_cast<T const*>(p.x) + row * p.row_stride),
        weight(static_cast<T const*>(p.weight)),
        is_copied(false) {
    if constexpr (kForm == NormForm::kQkNorm) {
      y += blockIdx.y * p.hidden;
      x += blockIdx.y * p.hidden;
      if (blockIdx.y == 1) weight = static_cast<T const*>(p.next_weight);
      is_copied = blockIdx.y == 2;
    }
  }
};

template <typename T, Layout kLayout, NormForm kForm>
__global__ void __launch_bounds__(kMaxSumThreads, 1) fencedRmsNormKernel(NormArgs const args) {
  extern __shared__ uint4 shared[];
  FencedRmsNormParams const& p = args.p;
  RowSumPlan const& plan = args.plan;
  int const row_in_block = threadIdx.x >> plan.threads_shift;
  Part<T, kLayout> const part(threadIdx.x & (plan.threads - 1), args);
  // In shared memory: a long row, its residual, slots of the sum. A long row has its own block.
  constexpr int kWaitingRows = kLayout != Layout::kLong ? 0 : kHasResidual<kForm> ? 2 : 1;
  auto* waiting = reinterpret_cast<T*>(shared);
  auto* waiting_residual = waiting + p.hidden;
  auto* sums = reinterpret_cast<float*>(waiting + kWaitingRows * p.hidden);
  int64_t row = (static_cast<int64_t>(blockIdx.x) << args.rows_shift) + row_in_block;
  waitForInputs();
  bool is_row = row < p.num_tokens;
  if constexpr (kLayout == Layout::kNarrow) {
    if (!is_row) row = 0;  // its lanes may share a warp with those of a row
  } else {
    if (!is_row) return;
    is_row = true;
  }
  RowOf<T, kForm> const rows(p, row);
  auto const* residual_row = static_cast<T const*>(p.residual) + row * p.hidden;
  auto* h = static_cast<T*>(p.h) + row * p.hidden;

  Held<T, kLayout> x(part, waiting);
  Held<T, kLayout> residual(part, waiting_residual);
  Weight<T, kLayout> weight(part, rows.weight);
  Weight<T, kLayout> next_weight(part, p.next_weight);
  x.fill(rows.x);
  if constexpr (kHasResidual<kForm>) residual.fill(residual_row);
  weight.fill();
  if constexpr (kHasTwoNorms<kForm>) next_weight.fill();
  if constexpr (kLayout == Layout::kLong) waitForCopies();
  if (rows.is_copied) {
    part.forEach([](int, int) {},
                 [&](int slot, int offset) {
                   if (is_row) part.store(rows.y, offset, x.get(slot, offset));
                 });
    return;
  }

  V<T> xs[kBatch<kLayout>];
  V<T> residuals[kBatch<kLayout>];
  V<T> weights[kBatch<kLayout>];
  SquareSum<kSumLanes> sum;
  part.forEach(
      [&](int slot, int offset) {
        xs[slot] = x.get(slot, offset);
        if constexpr (kAddsFirst<kForm>) residuals[slot] = residual.get(slot, offset);
      },
      [&](int slot, int offset) {
        if constexpr (kAddsFirst<kForm>) {
          xs[slot] = addVec(xs[slot], residuals[slot]);
          x.set(slot, offset, xs[slot]);
        }
        sum.take(toFloatVec(xs[slot]));
      });
  float inverse = sum.inverseRms(plan, p.eps, sums);

  if constexpr (kHasTwoNorms<kForm>) {
    SquareSum<kSumLanes> next_sum;
    part.forEach(
        [&](int slot, int offset) {
          xs[slot] = x.get(slot, offset);
          weights[slot] = weight.get(slot, offset);
          if constexpr (!kAddsFirst<kForm>) residuals[slot] = residual.get(slot, offset);
        },
        [&](int slot, int offset) {
          V<T> v = scale(xs[slot], inverse, weights[slot]);
          if constexpr (!kAddsFirst<kForm>) v = addVec(residuals[slot], v);
          next_sum.take(toFloatVec(v));
          x.set(slot, offset, v);
          if (is_row) part.store(h, offset, v);
        });
    inverse = next_sum.inverseRms(plan, p.eps, sums);
  }

  Weight<T, kLayout> const& last_weight = kHasTwoNorms<kForm> ? next_weight : weight;
  part.forEach(
      [&](int slot, int offset) {
        xs[slot] = x.get(slot, offset);
        weights[slot] = last_weight.get(slot, offset);
      },
      [&](int slot, int offset) {
        V<T> const v = scale(xs[slot], inverse, weights[slot]);
        if (is_row) part.store(rows.y, offset, v);
      });
}

// One row a block, in shared memory, so that every thread has whole 16-byte vectors in the
// elementwise passes and one running sum in between: many rows at the bandwidth of memory.
template <typename T, NormForm kForm>
__global__ void __launch_bounds__(kChainThreads) fencedRmsNormByChainsKernel(NormArgs const args) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(T));
  constexpr int kStep = kChainThreads * kWide;
  constexpr int kSlots = 3;
  extern __shared__ uint4 shared[];
  __shared__ float partial[kWarp];
  FencedRmsNormParams const& p = args.p;
  int64_t const row = blockIdx.x;
  auto* waiting = reinterpret_cast<T*>(shared);
  auto* waiting_residual = waiting + p.hidden;
  RowOf<T, kForm> const rows(p, row);
  auto const* x = rows.x;
  auto const* residual = static_cast<T const*>(p.residual) + row * p.hidden;
  int const first = threadIdx.x * kWide;
  waitForInputs();
  if constexpr (kAddsFirst<kForm>) {
    for (int begin = first; begin < p.hidden; begin += kSlots * kStep) {
      Vec<T, kWide> xs[kSlots];
      Vec<T, kWide> residuals[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) {
          xs[slot] = loadVec<T, kWide>(x + i);
          residuals[slot] = loadVec<T, kWide>(residual + i);
        }
      }
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) storeVec(waiting + i, addVec(xs[slot], residuals[slot]));
      }
    }
  } else {
    for (int i = first; i < p.hidden; i += kStep) {
      copyVecAsync<T, kWide>(waiting + i, x + i);
      if constexpr (kHasResidual<kForm>) {
        copyVecAsync<T, kWide>(waiting_residual + i, residual + i);
      }
    }
    waitForCopies();
  }
  if (rows.is_copied) {
    for (int i = first; i < p.hidden; i += kStep) {
      storeVec(rows.y + i, loadVec<T, kWide>(waiting + i));
    }
    return;
  }
  __syncthreads();

  auto const inverseRms = [&] {
    float const sum = sumSquaresByChains(waiting, p.hidden, partial);
    return rsqrtf(addRn(mulRn(sum, args.plan.factor), p.eps));
  };
  // Calls store(i, vector i of the row scaled), for a thread's own vectors: reads before writes.
  auto const scaleRow = [&](T const* weight, float inverse, auto&& store) {
    for (int begin = first; begin < p.hidden; begin += kSlots * kStep) {
      Vec<T, kWide> weights[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) weights[slot] = loadVec<T, kWide>(weight + i);
      }
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const i = begin + slot * kStep;
        if (i < p.hidden) store(i, scale(loadVec<T, kWide>(waiting + i), inverse, weights[slot]));
      }
    }
  };
  auto const* last_weight = rows.weight;
  float inverse = inverseRms();
  if constexpr (kHasTwoNorms<kForm>) {
    auto* h = static_cast<T*>(p.h) + row * p.hidden;
    __syncthreads();
    scaleRow(last_weight, inverse, [&](int i, Vec<T, kWide> v) {
      if constexpr (!kAddsFirst<kForm>) v = addVec(loadVec<T, kWide>(waiting_residual + i), v);
      storeVec(waiting + i, v);
      storeVec(h + i, v);
    });
    __syncthreads();
    last_weight = static_cast<T const*>(p.next_weight);
    inverse = inverseRms();
  }
  scaleRow(last_weight, inverse, [&](int i, Vec<T, kWide> const& v) { storeVec(rows.y + i, v); });
}

// One row a block, for plans of kMinFewPlan threads and more: a thread stands for kJoined threads
// of the plan, the first steps of whose tree are its own, or has kLanes of the running sums of one
// that kSharing threads share. Every warp takes the rest of the tree alone, so that a sum costs one
// barrier. Few rows are a matter of latency: of how many instructions one multiprocessor issues,
// and of nothing waiting for what could have been asked for before.
// kHidden: a row is at most this wide, and wider than kFewHidden less.
// kPlan: threads of the plan.
template <typename T, NormForm kForm, int kHidden, int kPlan>
__global__ void __launch_bounds__(kFewThreads) fencedRmsNormOfFewKernel(NormArgs const args) {
  constexpr int kJoined = kPlan > kFewThreads ? kPlan / kFewThreads : 1;
  constexpr int kSharing = kPlan < kFewThreads ? kFewThreads / kPlan : 1;
  constexpr int kLanes = kSumLanes / kSharing;
  constexpr int kSlots = kHidden / (kFewThreads * kLanes);
  // Slots that are there: narrower rows have another kernel, and a plan has a vector for each of
  // its threads.
  constexpr int kOfNarrower = (kHidden - kFewHidden) / (kFewThreads * kLanes);
  constexpr int kSure = kOfNarrower > kJoined ? kOfNarrower : kJoined;
  constexpr int kTotals = kFewThreads / kSharing;
  constexpr int kSegments = kTotals / kWarp;
  using Own = Words<kLanes / 2>;
  __shared__ float shared[2][kTotals];
  FencedRmsNormParams const& p = args.p;
  int64_t const row = blockIdx.x;
  int const vectors = p.hidden / kLanes;
  RowOf<T, kForm> const rows(p, row);
  auto const* residual_row = static_cast<T const*>(p.residual) + row * p.hidden;
  letNextStart();

  Own x[kSlots] = {};
  Own residual[kSlots] = {};
  Own weight[kSlots] = {};
  Own next_weight[kSlots] = {};
  auto const has = [&](int slot) {
    return slot < kSure || static_cast<int>(threadIdx.x) + slot * kFewThreads < vectors;
  };
  uint64_t const kept = keptInL2();
  auto const load = [&](Own(&into)[kSlots], void const* from, bool is_kept) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (has(slot)) {
        auto const* vec = static_cast<Own const*>(from) + threadIdx.x + slot * kFewThreads;
        into[slot] = is_kept ? loadKept(vec, kept) : *vec;
      }
    }
  };
  auto const loadWeights = [&] {
    load(weight, rows.weight, true);
    if constexpr (kHasTwoNorms<kForm>) load(next_weight, p.next_weight, true);
  };
  auto const loadInputs = [&] {
    if constexpr (kHasResidual<kForm>) load(residual, residual_row, true);
    load(x, rows.x, false);
  };
  // Weights need no waiting, but come after what is needed first where that is there. Where both
  // are in one branch, the compiler puts the weights off until x is summed.
  if (args.overlaps) {
    loadWeights();
    if constexpr (kHasResidual<kForm>) {
      int const line = threadIdx.x * (kLine / static_cast<int>(sizeof(T)));
      if (line < p.hidden) prefetchLine(residual_row + line);
    }
    waitForInputs();
    loadInputs();
  } else {
    waitForInputs();
    loadInputs();
    loadWeights();
  }
  auto const store = [&](void* to, int slot, Own const& value) {
    if (has(slot)) static_cast<Own*>(to)[threadIdx.x + slot * kFewThreads] = value;
  };
  if (rows.is_copied) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) store(rows.y, slot, x[slot]);
    return;
  }

  Vec<float, kLanes> wide[kSlots];
  // 1 / sqrt(mean + eps) of wide; calls meanwhile() where that waits.
  auto const inverseRms = [&](float* between, auto&& meanwhile) {
    float own[kJoined];
#pragma unroll
    for (int i = 0; i < kJoined; ++i) {
      SquareSum<kLanes> sum(wide[i]);
#pragma unroll
      for (int slot = i + kJoined; slot < kSlots; slot += kJoined) sum.take(wide[slot]);
      own[i] = sum.total();
    }
#pragma unroll
    for (int offset = kJoined / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < offset; ++i) own[i] = addRn(own[i], own[i + offset]);
    }
    if (threadIdx.x % kSharing == 0) between[threadIdx.x / kSharing] = own[0];
    __syncthreads();
    float sums[kSegments];
#pragma unroll
    for (int i = 0; i < kSegments; ++i) sums[i] = between[i * kWarp + threadIdx.x % kWarp];
#pragma unroll
    for (int offset = kSegments / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < offset; ++i) sums[i] = addRn(sums[i], sums[i + offset]);
    }
    float const sum = sumLanes<kWarp>(sums[0]);
    meanwhile();
    return rsqrtf(addRn(mulRn(sum, args.plan.factor), p.eps));
  };
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    if constexpr (kAddsFirst<kForm>) {
      wide[slot] = addWide<T>(x[slot], residual[slot]);
    } else {
      wide[slot] = toFloats<T>(x[slot]);
    }
  }
  float inverse = inverseRms(shared[0], [] {});
  if constexpr (kHasTwoNorms<kForm>) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      x[slot] = scaleWords<T>(wide[slot], inverse, weight[slot]);
      if constexpr (!kAddsFirst<kForm>) x[slot] = addWords<T>(residual[slot], x[slot]);
      wide[slot] = toFloats<T>(x[slot]);
    }
    inverse = inverseRms(shared[1], [&] {
      auto* h = static_cast<T*>(p.h) + row * p.hidden;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        if (has(slot)) {
          // The residual of a norm to come.
          storeKept(reinterpret_cast<Own*>(h) + threadIdx.x + slot * kFewThreads, x[slot], kept);
        }
      }
    });
  }
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    store(
        rows.y, slot,
        scaleWords<T>(wide[slot], inverse, kHasTwoNorms<kForm> ? next_weight[slot] : weight[slot]));
  }
}

using Kernel = void (*)(NormArgs);

template <typename T, NormForm kForm, int kHidden>
Kernel kernelOfFew(int plan_threads) {
  switch (plan_threads) {
    case kMinFewPlan:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, kMinFewPlan>;
    case 2 * kMinFewPlan:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, 2 * kMinFewPlan>;
    case 4 * kMinFewPlan:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, 4 * kMinFewPlan>;
    case kMaxSumThreads:
      return fencedRmsNormOfFewKernel<T, kForm, kHidden, kMaxSumThreads>;
  }
  return nullptr;
}

template <typename T, NormForm kForm>
Kernel kernelOfFew(int plan_threads, int hidden) {
  // float32 is no model's dtype on a GPU: it has the general kernel alone.
  if constexpr (sizeof(T) == 2) {
    if (hidden <= kFewHidden) return kernelOfFew<T, kForm, kFewHidden>(plan_threads);
    if (hidden <= 2 * kFewHidden) return kernelOfFew<T, kForm, 2 * kFewHidden>(plan_threads);
    return kernelOfFew<T, kForm, kMaxFewHidden>(plan_threads);
  }
  return nullptr;
}

template <typename T, NormForm kForm>
Kernel kernelOf(Layout layout, RowSumPlan const& plan, int hidden) {
  switch (layout) {
    case Layout::kNarrow:
      return fencedRmsNormKernel<T, Layout::kNarrow, kForm>;
    case Layout::kSingle:
      return fencedRmsNormKernel<T, Layout::kSingle, kForm>;
    case Layout::kShort:
      return fencedRmsNormKernel<T, Layout::kShort, kForm>;
    case Layout::kLong:
      return fencedRmsNormKernel<T, Layout::kLong, kForm>;
    case Layout::kFew:
      return kernelOfFew<T, kForm>(plan.threads, hidden);
    case Layout::kChains:
      return fencedRmsNormByChainsKernel<T, kForm>;
  }
  return nullptr;
}

template <typename T>
Kernel kernelOf(NormForm form, Layout layout, RowSumPlan const& plan, int hidden) {
  switch (form) {
    case NormForm::kNorm:
      return kernelOf<T, NormForm::kNorm>(layout, plan, hidden);
    case NormForm::kAddNorm:
      return kernelOf<T, NormForm::kAddNorm>(layout, plan, hidden);
    case NormForm::kNormAddNorm:
      return kernelOf<T, NormForm::kNormAddNorm>(layout, plan, hidden);
    case NormForm::kAddNormNorm:
      return kernelOf<T, NormForm::kAddNormNorm>(layout, plan, hidden);
    case NormForm::kQkNorm:
      return kernelOf<T, NormForm::kQkNorm>(layout, plan, hidden);
  }
  return nullptr;
}

// Rows that wait in a block's shared memory: x and, where it comes in late, the residual.
int waitingRows(NormForm form, Layout layout) {
  if (layout == Layout::kChains) return form == NormForm::kNormAddNorm ? 2 : 1;
  if (layout == Layout::kLong) return form == NormForm::kNorm || form == NormForm::kQkNorm ? 1 : 2;
  return 0;
}

Layout layoutOf(RowSumPlan const& plan, int hidden, DType dtype) {
  if (plan.is_narrow) return Layout::kNarrow;
  if (dtype != DType::kFloat32 && plan.threads == plan.group && plan.threads >= kMinFewPlan &&
      hidden <= kMaxFewHidden) {
    return Layout::kFew;
  }
  int64_t const vectors = ceilDiv(hidden / kSumLanes, plan.threads);
  if (vectors == 1) return Layout::kSingle;
  if (vectors <= kShortVectors) return Layout::kShort;
  return plan.threads == kWarp ? Layout::kChains : Layout::kLong;
}

// v of [q, k, v], rows stride apart. Grid: x rows.
struct CopyArgs {
  void* to;
  void const* from;
  int64_t row_bytes, stride_bytes;
};

__global__ void __launch_bounds__(kMinBlock) copyRowsKernel(CopyArgs const p) {
  waitForInputs();
  int64_t const offset = blockIdx.x * p.stride_bytes;
  auto const* from = reinterpret_cast<uint4 const*>(static_cast<char const*>(p.from) + offset);
  auto* to = reinterpret_cast<uint4*>(static_cast<char*>(p.to) + offset);
  for (int i = threadIdx.x; i < p.row_bytes / 16; i += kMinBlock) to[i] = from[i];
}

cudaError_t launchNorm(NormForm form, FencedRmsNormParams const& p, cudaStream_t stream,
                       Start start) {
  if (p.hidden < 8 || p.hidden % 8 != 0 || p.row_stride % 8 != 0 || p.num_tokens < 0 ||
      p.hidden * sizeOf(p.dtype) > kMaxRowBytes) {
    return cudaErrorInvalidValue;
  }
  if (!areAligned(16, p.y, p.h, p.x, p.residual, p.weight, p.next_weight)) {
    return cudaErrorMisalignedAddress;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  RowSumPlan const plan = planRowSum(p.num_tokens, p.hidden);
  Layout const layout = layoutOf(plan, p.hidden, p.dtype);
  bool const are_few = layout == Layout::kFew;
  bool const sums_in_block = !are_few && plan.threads > kWarp;
  int const waiting_rows = waitingRows(form, layout);
  int64_t const shared_bytes =
      waiting_rows * p.hidden * sizeOf(p.dtype) + (sums_in_block ? kSumBytes : 0);
  // Rows of at most a warp's threads share a block.
  int const rows_per_block =
      layout == Layout::kChains || plan.threads > kWarp ? 1 : kMinBlock / plan.threads;
  int64_t const grid = ceilDiv(p.num_tokens, rows_per_block);
  if (grid > kMaxGridX) return cudaErrorInvalidValue;
  int const block = layout == Layout::kChains ? kChainThreads
                    : are_few                 ? kFewThreads
                                              : rows_per_block * plan.threads;
  if (are_few) start = startBesideProducts(p.num_tokens);
  NormArgs const args{p, plan, log2Of(rows_per_block), start == Start::kOverlapping};
  return dispatchDType(p.dtype, [&](auto tag) {
    Kernel const kernel = kernelOf<typename decltype(tag)::Type>(form, layout, plan, p.hidden);
    if (shared_bytes > kFreeSharedBytes) {
      if (cudaError_t error = cudaFuncSetAttribute(
              kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
          error != cudaSuccess) {
        return error;
      }
    }
    return launchKernel(kernel, dim3(grid, form == NormForm::kQkNorm ? 3 : 1), block, stream, args,
                        shared_bytes, start);
  });
}

}  // namespace

cudaError_t launchFencedRmsNorm(NormForm form, FencedRmsNormParams const& p, cudaStream_t stream) {
  return launchNorm(form, p, stream, Start::kAfterPrevious);
}

cudaError_t launchFencedQkNorm(FencedQkNormParams const& p, cudaStream_t stream) {
  int64_t const stride = int64_t{p.q_width} + 2 * int64_t{p.k_width};
  int64_t const size = sizeOf(p.dtype);
  auto const* from = static_cast<char const*>(p.qkv);
  auto* to = static_cast<char*>(p.normed);
  FencedRmsNormParams norm{};
  norm.y = to;
  norm.x = from;
  norm.weight = p.q_weight;
  norm.next_weight = p.k_weight;
  norm.num_tokens = p.num_tokens;
  norm.row_stride = stride;
  norm.hidden = p.q_width;
  norm.eps = p.eps;
  norm.dtype = p.dtype;
  if (p.q_width == p.k_width) {
    return launchNorm(NormForm::kQkNorm, norm, stream, Start::kAfterPrevious);
  }
  // Fewer key heads: other plans, so other kernels.
  if (cudaError_t error = launchNorm(NormForm::kNorm, norm, stream, Start::kAfterPrevious);
      error != cudaSuccess) {
    return error;
  }
  int64_t const k_begin = p.q_width * size;
  norm.y = to + k_begin;
  norm.x = from + k_begin;
  norm.weight = p.k_weight;
  norm.hidden = p.k_width;
  if (cudaError_t error = launchNorm(NormForm::kNorm, norm, stream, Start::kOverlapping);
      error != cudaSuccess) {
    return error;
  }
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.num_tokens > kMaxGridX) return cudaErrorInvalidValue;
  int64_t const v_begin = k_begin + p.k_width * size;
  CopyArgs const copy{to + v_begin, from + v_begin, p.k_width * size, stride * size};
  return launchKernel(copyRowsKernel, dim3(p.num_tokens), kMinBlock, stream, copy, 0,
                      Start::kOverlapping);
}

}  // namespace looptrt
