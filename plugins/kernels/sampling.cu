#include <cuda_runtime.h>

#include "looptrt/dispatch.cuh"
#include "looptrt/fence.cuh"
#include "looptrt/launch.cuh"
#include "looptrt/mix64.cuh"
#include "sampling.cuh"

namespace looptrt {
namespace {

constexpr int kWarps = 32;
constexpr int kBlock = kWarps * 32;
constexpr int kMaxVocab = 1 << 19;
constexpr double kWeightScale = 17592186044416.0;  // 2**44; times kMaxVocab below 2**64
constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
constexpr int kTopShift = 32 - kDigitBits;
constexpr int kCopies = 8;  // of the bins, so that fewer threads add to one place
constexpr uint64_t kSamplingStream = 0xA54FF53A5F1D36F1;  // as in runtime/sampler.py

// A finite number as an integer of the same order; +0 and -0 are one number.
__device__ __forceinline__ uint32_t keyOf(float x) {
  uint32_t const word = __float_as_uint(x == 0.0f ? 0.0f : x);
  return word >> 31 != 0 ? ~word : word | 0x80000000u;
}

__device__ __forceinline__ float numberOf(uint32_t key) {
  return __uint_as_float(key >> 31 != 0 ? key & 0x7fffffffu : ~key);
}

// How many tokens, and their weights in units of 2**-44.
struct Amount {
  uint64_t mass;
  uint32_t count;
};

struct Shared {
  uint32_t counts[kCopies][kBins];
  uint32_t low[kCopies][kBins];  // of the mass
  uint32_t high[kCopies][kBins];
  Amount top[kBins];  // of every value of the keys' first digit
  Amount bins[kBins];
  uint64_t warp_values[kWarps];
  Amount above;
  int32_t digit;
  int32_t token;
};

enum class By { kCount, kMass };

// The token at which a goal is reached, going down from the most likely one.
struct Place {
  uint32_t key;
  Amount above;  // of the tokens with larger keys
};

// One row of logits and what its block shares.
template <typename T>
struct Row {
  T const* logits;
  int32_t vocab;
  float largest;
  double temperature;
  Shared& shared;

  __device__ __forceinline__ float logit(int token) const { return toFloat(logits[token]); }

  // exp((x - largest) / temperature) in units of 2**-44.
  __device__ __forceinline__ uint64_t weight(float x) const {
    double const distance = (static_cast<double>(x) - static_cast<double>(largest)) / temperature;
    return static_cast<uint64_t>(__double2ull_rn(exp(distance) * kWeightScale));
  }

  // Sums up tokens by one digit of their keys, among those whose higher digits are `prefix`.
  __device__ void fill(Amount* bins, int shift, uint32_t prefix) const {
    __syncthreads();
    for (int i = threadIdx.x; i < kCopies * kBins; i += kBlock) {
      int const copy = i / kBins;
      int const bin = i % kBins;
      shared.counts[copy][bin] = shared.low[copy][bin] = shared.high[copy][bin] = 0;
    }
    __syncthreads();
    int const copy = threadIdx.x % kCopies;
    for (int token = threadIdx.x; token < vocab; token += kBlock) {
      float const x = logit(token);
      uint32_t const key = keyOf(x);
      if (shift < kTopShift && key >> (shift + kDigitBits) != prefix) continue;
      int const bin = key >> shift & (kBins - 1);
      uint64_t const mass = weight(x);
      auto const low = static_cast<uint32_t>(mass);
      atomicAdd(&shared.counts[copy][bin], 1u);
      if (mass == 0) continue;
      uint32_t const before = atomicAdd(&shared.low[copy][bin], low);
      uint32_t const carry = before + low < before ? 1 : 0;
      uint32_t const high = static_cast<uint32_t>(mass >> 32) + carry;
      if (high != 0) atomicAdd(&shared.high[copy][bin], high);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < kBins; bin += kBlock) {
      Amount amount{0, 0};
      for (int i = 0; i < kCopies; ++i) {
        amount.count += shared.counts[i][bin];
        amount.mass += (uint64_t{shared.high[i][bin]} << 32) + shared.low[i][bin];
      }
      bins[bin] = amount;
    }
    __syncthreads();
  }

  // The largest digit at which goal is reached, and what lies above it. Warp 0; every lane has
  // eight digits, lane 0 the highest.
  template <By kBy>
  __device__ void pick(Amount const* bins, uint64_t goal, Amount above) const {
    constexpr int kDigits = kBins / 32;
    int const lane = threadIdx.x;
    int const first = kBins - 1 - lane * kDigits;
    Amount own{0, 0};
    for (int i = 0; i < kDigits; ++i) {
      own.mass += bins[first - i].mass;
      own.count += bins[first - i].count;
    }
    Amount through = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      uint64_t const mass = __shfl_up_sync(0xffffffffu, through.mass, step);
      uint32_t const count = __shfl_up_sync(0xffffffffu, through.count, step);
      if (lane >= step) {
        through.mass += mass;
        through.count += count;
      }
    }
    through.mass += above.mass;
    through.count += above.count;
    bool const is_reached = (kBy == By::kMass ? through.mass : through.count) >= goal;
    uint32_t const reached = __ballot_sync(0xffffffffu, is_reached);
    if (lane != (reached == 0 ? 31 : __ffs(reached) - 1)) return;
    above = {through.mass - own.mass, through.count - own.count};
    int digit = first;
    for (int i = 0; i < kDigits - 1; ++i, --digit) {
      Amount const next{above.mass + bins[digit].mass, above.count + bins[digit].count};
      if ((kBy == By::kMass ? next.mass : next.count) >= goal) break;
      above = next;
    }
    shared.above = above;
    shared.digit = digit;
  }

  // Where the amount from the most likely token down first reaches goal, 1 or more. Needs
  // shared.top.
  template <By kBy>
  __device__ Place descend(uint64_t goal) const {
    Place place{0, {0, 0}};
    for (int shift = kTopShift; shift >= 0; shift -= kDigitBits) {
      if (shift < kTopShift) fill(shared.bins, shift, place.key);
      if (threadIdx.x < 32) {
        pick<kBy>(shift < kTopShift ? shared.bins : shared.top, goal, place.above);
      }
      __syncthreads();
      place.key = place.key << kDigitBits | shared.digit;
      place.above = shared.above;
      __syncthreads();
    }
    return place;
  }

  // Mass of the `count` most likely tokens.
  __device__ uint64_t massOf(uint32_t count) const {
    Place const last = descend<By::kCount>(count);
    return last.above.mass + (count - last.above.count) * weight(numberOf(last.key));
  }

  // Mass of the fewest most likely tokens that have at least `goal` together.
  __device__ uint64_t massFrom(uint64_t goal) const {
    Place const last = descend<By::kMass>(goal);
    uint64_t const each = weight(numberOf(last.key));
    return last.above.mass + (goal - last.above.mass + each - 1) / each * each;
  }

  // Mass of the tokens with at least `share` of the most likely one's weight.
  __device__ uint64_t massOfAtLeast(double share) const {
    uint64_t mass = 0;
    for (int token = threadIdx.x; token < vocab; token += kBlock) {
      double const distance =
          (static_cast<double>(logit(token)) - static_cast<double>(largest)) / temperature;
      if (exp(distance) >= share) mass += weight(logit(token));
    }
    return sum(mass);
  }

  __device__ uint64_t sum(uint64_t value) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.warp_values[threadIdx.x / 32] = value;
    __syncthreads();
    uint64_t total = 0;
    for (int warp = 0; warp < kWarps; ++warp) total += shared.warp_values[warp];
    return total;
  }

  // The token with the rank-th smallest id, from 0, of those with a key. Every warp looks through
  // one stretch of ids.
  __device__ int find(uint32_t key, uint32_t rank) const {
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    int const stretch = (vocab + kBlock - 1) / kBlock * 32;
    int const begin = warp * stretch;
    uint32_t count = 0;
    for (int base = begin; base < begin + stretch; base += 32) {
      bool const is_one = base + lane < vocab && keyOf(logit(base + lane)) == key;
      count += __popc(__ballot_sync(0xffffffffu, is_one));
    }
    __syncthreads();
    if (lane == 0) shared.warp_values[warp] = count;
    __syncthreads();
    for (int i = 0; i < warp; ++i) {
      uint32_t const before = static_cast<uint32_t>(shared.warp_values[i]);
      if (rank < before) return -1;
      rank -= before;
    }
    if (rank >= count) return -1;
    for (int base = begin;; base += 32) {
      bool const is_one = base + lane < vocab && keyOf(logit(base + lane)) == key;
      uint32_t const ones = __ballot_sync(0xffffffffu, is_one);
      if (rank < static_cast<uint32_t>(__popc(ones))) {
        return is_one && __popc(ones & ((1u << lane) - 1)) == rank ? base + lane : -1;
      }
      rank -= __popc(ones);
    }
  }
};

// The most likely token, the smaller id of equal ones; -1 if a logit is not finite. All threads.
template <typename T>
__device__ int mostLikely(Row<T> const& row) {
  uint64_t best = 0;
  bool is_finite = true;
  for (int token = threadIdx.x; token < row.vocab; token += kBlock) {
    float const x = row.logit(token);
    is_finite &= fabsf(x) < __int_as_float(0x7f800000);
    uint64_t const candidate = uint64_t{keyOf(x)} << 32 | static_cast<uint32_t>(~token);
    best = candidate > best ? candidate : best;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    uint64_t const other = __shfl_xor_sync(0xffffffffu, best, step);
    best = other > best ? other : best;
  }
  bool const are_finite = __all_sync(0xffffffffu, is_finite);
  if (threadIdx.x % 32 == 0) {
    row.shared.warp_values[threadIdx.x / 32] = are_finite ? best : ~uint64_t{0};
  }
  __syncthreads();
  best = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    uint64_t const other = row.shared.warp_values[warp];
    best = other > best ? other : best;
  }
  __syncthreads();
  return best == ~uint64_t{0} ? -1 : static_cast<int>(~static_cast<uint32_t>(best));
}

// A row a block.
template <typename T>
__global__ void __launch_bounds__(kBlock) samplingKernel(SamplingParams const p) {
  __shared__ Shared shared;
  waitForInputs();
  int64_t const index = blockIdx.x;
  Row<T> row{static_cast<T const*>(p.logits) + index * p.vocab, p.vocab, 0.0f,
             p.temperatures[index], shared};
  int const best = mostLikely(row);
  if (best < 0 || !(row.temperature > 0.0)) {
    if (threadIdx.x == 0) {
      p.tokens[index] = max(best, 0);
      p.failed[index] = best < 0 ? 1 : 0;
    }
    return;
  }
  row.largest = row.logit(best);
  row.fill(shared.top, kTopShift, 0);

  // The tokens that each filter keeps are the first ones in order, so the fewest of them are kept.
  int const top_k = p.top_ks[index];
  uint64_t total = 0;
  if (top_k > 0 && top_k < p.vocab) {
    total = row.massOf(top_k);
  } else {
    for (int bin = 0; bin < kBins; ++bin) total += shared.top[bin].mass;
  }
  uint64_t kept = total;
  double const top_p = p.top_ps[index];
  if (top_p < 1.0) {
    double const goal = ceil(top_p * static_cast<double>(total));
    kept = row.massFrom(goal < 1.0 ? 1 : static_cast<uint64_t>(goal));
    kept = kept < total ? kept : total;
  }
  double const min_p = p.min_ps[index];
  if (min_p > 0.0) {
    uint64_t const likely = row.massOfAtLeast(min_p);
    kept = likely < kept ? likely : kept;
  }
  uint64_t const hashed = mix64(mix64(static_cast<uint64_t>(p.seeds[index]) ^ kSamplingStream) ^
                                mix64(static_cast<uint64_t>(int64_t{p.positions[index]})));
  uint64_t const target = __umul64hi(hashed >> 11 << 11, kept);  // floor(uniform * kept)
  Place const place = row.template descend<By::kMass>(target + 1);
  uint64_t const each = row.weight(numberOf(place.key));
  auto const rank = static_cast<uint32_t>((target - place.above.mass) / each);
  int const token = row.find(place.key, rank);
  if (token >= 0) {
    p.tokens[index] = token;
    p.failed[index] = 0;
  }
}

}  // namespace

cudaError_t launchSampling(SamplingParams const& p, cudaStream_t stream) {
  if (p.num_rows < 0 || p.num_rows > kMaxGridX || p.vocab < 1 || p.vocab > kMaxVocab) {
    return cudaErrorInvalidValue;
  }
  if (p.num_rows == 0) return cudaSuccess;
  return dispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return launchKernel(samplingKernel<T>, dim3(p.num_rows), kBlock, stream, p);
  });
}

}  // namespace looptrt
