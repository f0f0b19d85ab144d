// The fenced norms of any plan: several rows a block or one, in registers or in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fenced_rms_norm_row.cuh"
#include "looptrt/launch.cuh"

namespace looptrt {

constexpr int kShortVectors = 4;  // a thread holds this many vectors in registers
constexpr int kLongBatch = 4;     // vectors a thread reads before it writes one

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

}  // namespace looptrt
