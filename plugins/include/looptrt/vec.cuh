// Vectors of elements, moved with the widest loads and stores that their alignment allows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace looptrt {

// kSize elements aligned to their whole size, at most to 16 bytes.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vec {
  T values[kSize];

  __device__ __forceinline__ T& operator[](int i) { return values[i]; }
  __device__ __forceinline__ T const& operator[](int i) const { return values[i]; }
};

template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> loadVec(T const* from) {
  return *reinterpret_cast<Vec<T, kSize> const*>(from);
}

template <typename T, int kSize>
__device__ __forceinline__ void storeVec(T* to, Vec<T, kSize> const& value) {
  *reinterpret_cast<Vec<T, kSize>*>(to) = value;
}

// Starts a copy of one vector from global to shared memory; the thread sees it after
// waitForCopies().
template <typename T, int kSize>
__device__ __forceinline__ void copyVecAsync(T* shared, T const* global) {
  constexpr int kBytes = sizeof(Vec<T, kSize>);
  static_assert(kBytes == 8 || kBytes == 16);
  auto const address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(global), "n"(kBytes)
               : "memory");
}

__device__ __forceinline__ void waitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Policy of memory that is read again and again while weights stream through the L2 cache: such a
// line goes last. An access without it would make the line one like any other.
__device__ __forceinline__ uint64_t keptInL2() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One value of 2, 4 or 8 bytes by a policy of L2, past L1.
template <typename V>
__device__ __forceinline__ V loadKept(V const* from, uint64_t policy) {
  V value;
  if constexpr (sizeof(V) == 2) {
    uint16_t bits;
    asm volatile("ld.global.cg.L2::cache_hint.b16 %0, [%1], %2;"
                 : "=h"(bits)
                 : "l"(from), "l"(policy)
                 : "memory");
    memcpy(&value, &bits, sizeof(value));
  } else if constexpr (sizeof(V) == 4) {
    uint32_t bits;
    asm volatile("ld.global.cg.L2::cache_hint.b32 %0, [%1], %2;"
                 : "=r"(bits)
                 : "l"(from), "l"(policy)
                 : "memory");
    memcpy(&value, &bits, sizeof(value));
  } else {
    static_assert(sizeof(V) == 8);
    uint2 bits;
    asm volatile("ld.global.cg.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(bits.x), "=r"(bits.y)
                 : "l"(from), "l"(policy)
                 : "memory");
    memcpy(&value, &bits, sizeof(value));
  }
  return value;
}

// One value of 4 or 8 bytes by a policy of L2.
template <typename V>
__device__ __forceinline__ void storeKept(V* to, V const& value, uint64_t policy) {
  if constexpr (sizeof(V) == 4) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(value));
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(bits), "l"(policy)
                 : "memory");
  } else {
    static_assert(sizeof(V) == 8);
    uint2 bits;
    memcpy(&bits, &value, sizeof(value));
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(bits.x),
                 "r"(bits.y), "l"(policy)
                 : "memory");
  }
}

// Asks for a line of memory in the L2 cache, ahead of everything that merely streams through. L2 is
// where stores meet, so this may come before waitForInputs() whoever writes there.
__device__ __forceinline__ void prefetchLine(void const* global) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(global) : "memory");
}

inline bool isAligned(void const* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <typename... Pointers>
bool areAligned(int64_t bytes, Pointers... pointers) {
  return (isAligned(pointers, bytes) && ...);
}

}  // namespace looptrt
