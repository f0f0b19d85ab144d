// The finaliser of SplitMix64: every counter-based random number of the library comes from it.
#pragma once

#include <cstdint>

namespace looptrt {

__device__ __forceinline__ uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace looptrt
