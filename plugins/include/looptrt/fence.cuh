// Rounding fences: arithmetic that rounds exactly where PyTorch's eager operators round.
//
// Every step is one PTX instruction with its rounding written out, inside asm: the compiler can
// neither contract a product into a sum nor drop a conversion to a narrower type and back.
//
// PyTorch computes an operator on a 16-bit type in float32 and rounds the result. Products of two
// 16-bit numbers are exact in float32 wherever that matters, so the packed 16-bit multiply, which
// rounds once, has the same bits; sums are not, and stay in float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "looptrt/vec.cuh"

namespace looptrt {

__device__ __forceinline__ float addRn(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

__device__ __forceinline__ float subRn(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

__device__ __forceinline__ float mulRn(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// Rounds to T, to nearest even; float is left as it is.
template <typename T>
__device__ __forceinline__ T roundTo(float x);

template <>
__device__ __forceinline__ float roundTo<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ __nv_bfloat16 roundTo<__nv_bfloat16>(float x) {
  __nv_bfloat16_raw raw;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(raw.x) : "f"(x));
  return raw;
}

template <>
__device__ __forceinline__ __half roundTo<__half>(float x) {
  __half_raw raw;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(raw.x) : "f"(x));
  return raw;
}

__device__ __forceinline__ float toFloat(float x) { return x; }
__device__ __forceinline__ float toFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float toFloat(__half x) { return __half2float(x); }

// Two neighbours in one register.
template <typename T>
struct Packed;

template <>
struct Packed<__nv_bfloat16> {
  static constexpr uint32_t kExponent = 0x7f80;  // all ones: infinity or NaN
  __device__ __forceinline__ static float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ __forceinline__ static float high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
  }
  // x rounded and wide again, in one step: what is rounded is the upper half of a float.
  __device__ __forceinline__ static float rounded(float x) {
    return __uint_as_float(roundTo(0.0f, x));
  }
  __device__ __forceinline__ static uint32_t roundTo(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  __device__ __forceinline__ static uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t product;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
    // Plus -0: leaves every product as it is, its sign too.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return product;
  }
};

template <>
struct Packed<__half> {
  static constexpr uint32_t kExponent = 0x7c00;  // all ones: infinity or NaN
  __device__ __forceinline__ static float low(uint32_t pair) {
    return toFloat(__half(__half_raw{static_cast<unsigned short>(pair)}));
  }
  __device__ __forceinline__ static float high(uint32_t pair) { return low(pair >> 16); }
  __device__ __forceinline__ static float rounded(float x) { return low(roundTo(x, 0.0f)); }
  __device__ __forceinline__ static uint32_t roundTo(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  __device__ __forceinline__ static uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }
};

// Rounds every element of x to T.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> roundVec(Vec<float, kSize> const& x) {
  Vec<T, kSize> rounded;
  if constexpr (sizeof(T) == 4 || kSize % 2 != 0) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) rounded[i] = roundTo<T>(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      uint32_t const pair = Packed<T>::roundTo(x[i], x[i + 1]);
      memcpy(&rounded.values[i], &pair, sizeof(pair));
    }
  }
  return rounded;
}

template <typename T, int kSize>
__device__ __forceinline__ Vec<float, kSize> toFloatVec(Vec<T, kSize> const& x) {
  Vec<float, kSize> wide;
#pragma unroll
  for (int i = 0; i < kSize; ++i) wide[i] = toFloat(x[i]);
  return wide;
}

// a * b, an eager operator on T.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> mulVec(Vec<T, kSize> const& a, Vec<T, kSize> const& b) {
  Vec<T, kSize> product;
  if constexpr (sizeof(T) == 4 || kSize % 2 != 0) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      product[i] = roundTo<T>(mulRn(toFloat(a[i]), toFloat(b[i])));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      uint32_t first;
      uint32_t second;
      memcpy(&first, &a.values[i], sizeof(first));
      memcpy(&second, &b.values[i], sizeof(second));
      first = Packed<T>::mul(first, second);
      memcpy(&product.values[i], &first, sizeof(first));
    }
  }
  return product;
}

// a + b, an eager operator on T.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> addVec(Vec<T, kSize> const& a, Vec<T, kSize> const& b) {
  Vec<float, kSize> sum;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum[i] = addRn(toFloat(a[i]), toFloat(b[i]));
  return roundVec<T>(sum);
}

// a - b, an eager operator on T.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> subVec(Vec<T, kSize> const& a, Vec<T, kSize> const& b) {
  Vec<float, kSize> difference;
#pragma unroll
  for (int i = 0; i < kSize; ++i) difference[i] = subRn(toFloat(a[i]), toFloat(b[i]));
  return roundVec<T>(difference);
}

}  // namespace looptrt
