// float16 as its bits.
#pragma once

#include <cstdint>
#include <cstring>

struct __half_raw {
  unsigned short x;
};
struct __half {
  unsigned short x;
  __half() = default;
  __half(__half_raw raw) : x(raw.x) {}
};

// Not the compiler's own conversion, which is a slow call where the CPU has no instruction for it.
inline float __half2float(__half from) {
  uint32_t word = (from.x & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  value *= 0x1p112f;  // of the exponents' biases; makes subnormal numbers normal
  std::memcpy(&word, &value, sizeof(value));
  if ((from.x & 0x7c00u) == 0x7c00u) word |= 0x7f800000u;
  word |= (from.x & 0x8000u) << 16;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}
