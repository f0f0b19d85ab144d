// The device side of CUDA C++ that the kernels use, on the emulated machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_runtime_api.h"
#include "ptx.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;
inline int64_t min(int64_t a, int b) { return a < b ? a : b; }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return static_cast<float>(1.0 / std::sqrt(double{a})); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline unsigned long long __double2ull_rn(double a) { return std::nearbyint(a); }

template <typename To, typename From>
To emulatorBits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __int_as_float(unsigned a) { return emulatorBits<float>(a); }
inline float __uint_as_float(unsigned a) { return emulatorBits<float>(a); }
inline unsigned __float_as_uint(float a) { return emulatorBits<unsigned>(a); }
inline int __ffs(unsigned a) { return __builtin_ffs(static_cast<int>(a)); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}

template <typename T>
T __ldcg(T const* from) {
  return *from;
}
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  unsigned const before = *to;
  *to += value;
  return before;
}
inline unsigned atomicOr(unsigned* to, unsigned value) {
  unsigned const before = *to;
  *to |= value;
  return before;
}

inline size_t __cvta_generic_to_shared(void const* pointer) {
  return emulator::addressOfShared(pointer);
}
inline void __syncthreads() { emulator::barrier(0, 0); }
inline void __syncwarp() {
  emulator::together("__syncwarp", nullptr, [](void* const*) {});
}

// --- between lanes of a warp, all of them --------------------------------------------------------
template <typename T>
struct EmulatorShuffle {
  T value, result;
  unsigned from;
};

template <typename T>
T emulatorShuffle(char const* what, unsigned mask, T value, unsigned from) {
  if (mask != 0xffffffffu) emulator::fail("%s with a mask of some lanes", what);
  EmulatorShuffle<T> own{value, value, from};
  emulator::together(what, &own, [](void* const* lanes) {
    for (unsigned i = 0; i < 32; ++i) {
      auto* const lane = static_cast<EmulatorShuffle<T>*>(lanes[i]);
      if (lane == nullptr) continue;
      auto const* const source = static_cast<EmulatorShuffle<T>*>(lanes[lane->from]);
      if (source == nullptr)
        return emulator::fail("lane %u is read, which is not there", lane->from);
      lane->result = source->value;
    }
  });
  return own.result;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulatorShuffle("__shfl_sync", mask, value, lane & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return emulatorShuffle("__shfl_xor_sync", mask, value, (threadIdx.x ^ bits) & 31);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  unsigned const lane = threadIdx.x % 32;
  return emulatorShuffle("__shfl_up_sync", mask, value, lane >= by ? lane - by : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  unsigned const lane = threadIdx.x % 32;
  return emulatorShuffle("__shfl_down_sync", mask, value, lane + by < 32 ? lane + by : lane);
}

struct EmulatorBallot {
  bool value;
  unsigned result;
};

inline unsigned __ballot_sync(unsigned mask, bool value) {
  if (mask != 0xffffffffu) emulator::fail("a vote with a mask of some lanes");
  EmulatorBallot own{value, 0};
  emulator::together("__ballot_sync", &own, [](void* const* lanes) {
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; ++i) {
      auto const* const lane = static_cast<EmulatorBallot*>(lanes[i]);
      if (lane != nullptr && lane->value) votes |= 1u << i;
    }
    for (unsigned i = 0; i < 32; ++i) {
      if (lanes[i] != nullptr) static_cast<EmulatorBallot*>(lanes[i])->result = votes;
    }
  });
  return own.result;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, !value) == 0; }
