// Vectors of elements, moved with the widest loads and stores that their alignment allows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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
