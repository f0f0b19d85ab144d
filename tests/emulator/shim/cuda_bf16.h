// bfloat16 as its bits.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16_raw {
  unsigned short x;
};
struct __nv_bfloat16 {
  unsigned short x;
  __nv_bfloat16() = default;
  __nv_bfloat16(__nv_bfloat16_raw raw) : x(raw.x) {}
};

inline float __bfloat162float(__nv_bfloat16 from) {
  uint32_t const word = uint32_t{from.x} << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}
