// PTX instructions that the kernels write out, one function each: the instruction's name with _ for
// every other sign, its operands in PTX's order, all braces opened. build.py makes the calls.
//
// Rounding is IEEE's, as in PTX; ex2.approx is exp2f, whose last bits are not a GPU's. A product of
// the tensor cores is summed in float64 and rounded once, where a GPU cuts: its last bits differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "machine.h"

namespace emulator::ptx {

inline void add_rn_f32(float& d, float a, float b) { d = a + b; }
inline void sub_rn_f32(float& d, float a, float b) { d = a - b; }
inline void mul_rn_f32(float& d, float a, float b) { d = a * b; }
inline void ex2_approx_ftz_f32(float& d, float a) {
  auto const flush = [](float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
  d = flush(std::exp2(flush(a)));
}

// --- 16-bit elements -----------------------------------------------------------------------------
inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float wide(__half x) { return __half2float(x); }

inline void cvt_rn_bf16_f32(unsigned short& d, float a) {
  uint32_t word;
  std::memcpy(&word, &a, sizeof(word));
  d = std::isnan(a) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
inline void cvt_rn_f16_f32(unsigned short& d, float a) {
  uint32_t word;
  std::memcpy(&word, &a, sizeof(word));
  uint32_t const sign = word >> 16 & 0x8000u;
  float const magnitude = std::fabs(a);
  word &= 0x7fffffffu;
  if (std::isnan(a)) {
    d = 0x7fff;
  } else if (magnitude >= 65520.0f) {
    d = sign | 0x7c00;
  } else if (magnitude < 0x1p-14f) {
    d = sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f));  // subnormal
  } else {
    d = sign | (word - 0x38000000u + 0xfffu + (word >> 13 & 1)) >> 13;
  }
}
inline void narrow(__nv_bfloat16& d, float a) { cvt_rn_bf16_f32(d.x, a); }
inline void narrow(__half& d, float a) { cvt_rn_f16_f32(d.x, a); }

template <typename T>
T elementOf(uint32_t word, int index) {
  T element;
  element.x = static_cast<unsigned short>(word >> 16 * index);
  return element;
}
template <typename T>
uint32_t packed(float low, float high) {
  T elements[2];
  narrow(elements[0], low);
  narrow(elements[1], high);
  return elements[0].x | uint32_t{elements[1].x} << 16;
}

inline void cvt_rn_bf16x2_f32(uint32_t& d, float high, float low) {
  d = packed<__nv_bfloat16>(low, high);
}
inline void cvt_rn_f16x2_f32(uint32_t& d, float high, float low) { d = packed<__half>(low, high); }

template <typename T>
uint32_t product(uint32_t a, uint32_t b) {
  auto const of = [&](int i) { return wide(elementOf<T>(a, i)) * wide(elementOf<T>(b, i)); };
  return packed<T>(of(0), of(1));
}
inline void mul_rn_bf16x2(uint32_t& d, uint32_t a, uint32_t b) { d = product<__nv_bfloat16>(a, b); }
inline void mul_rn_f16x2(uint32_t& d, uint32_t a, uint32_t b) { d = product<__half>(a, b); }

// --- tensor cores --------------------------------------------------------------------------------
struct MmaOperands {
  float* d[4];
  uint32_t a[4], b[2];
  float c[4];
};

template <typename T>
void multiplyTogether(void* const* lanes) {
  float a[16][16], b[8][16];
  for (int lane = 0; lane < 32; ++lane) {
    auto const* const own = static_cast<MmaOperands const*>(lanes[lane]);
    int const group = lane / 4;
    for (int i = 0; i < 2; ++i) {
      int const k = lane % 4 * 2 + i;
      for (int half = 0; half < 2; ++half) {
        a[group + 8 * half][k] = wide(elementOf<T>(own->a[half], i));
        a[group + 8 * half][k + 8] = wide(elementOf<T>(own->a[half + 2], i));
        b[group][k + 8 * half] = wide(elementOf<T>(own->b[half], i));
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto* const own = static_cast<MmaOperands*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) {
      float const* const row = a[lane / 4 + i / 2 * 8];
      float const* const column = b[lane % 4 * 2 + i % 2];
      double sum = own->c[i];
      for (int k = 0; k < 16; ++k) sum += double{row[k]} * column[k];
      *own->d[i] = static_cast<float>(sum);
    }
  }
}

template <typename T>
void multiply(char const* what, MmaOperands own) {
  together(what, &own, multiplyTogether<T>);
}

inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2,
                                                                float& d3, uint32_t a0, uint32_t a1,
                                                                uint32_t a2, uint32_t a3,
                                                                uint32_t b0, uint32_t b1, float c0,
                                                                float c1, float c2, float c3) {
  multiply<__nv_bfloat16>("mma of bf16",
                          {{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}});
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2,
                                                              float& d3, uint32_t a0, uint32_t a1,
                                                              uint32_t a2, uint32_t a3, uint32_t b0,
                                                              uint32_t b1, float c0, float c1,
                                                              float c2, float c3) {
  multiply<__half>("mma of f16",
                   {{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}});
}

struct LoadOperands {
  uint32_t* d[4];
  uint32_t row;
};

template <bool kIsTransposed>
void loadTogether(void* const* lanes) {
  uint16_t matrices[4][8][8];
  for (int i = 0; i < 32; ++i) {
    std::memcpy(matrices[i / 8][i % 8],
                bytesOfShared(static_cast<LoadOperands*>(lanes[i])->row, 16), 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    int const row = lane / 4;
    int const column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      auto const& matrix = matrices[i];
      uint32_t const low = kIsTransposed ? matrix[column][row] : matrix[row][column];
      uint32_t const high = kIsTransposed ? matrix[column + 1][row] : matrix[row][column + 1];
      *static_cast<LoadOperands*>(lanes[lane])->d[i] = low | high << 16;
    }
  }
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& d0, uint32_t& d1, uint32_t& d2,
                                                     uint32_t& d3, uint32_t row) {
  LoadOperands own{{&d0, &d1, &d2, &d3}, row};
  together("ldmatrix", &own, loadTogether<false>);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& d0, uint32_t& d1, uint32_t& d2,
                                                           uint32_t& d3, uint32_t row) {
  LoadOperands own{{&d0, &d1, &d2, &d3}, row};
  together("ldmatrix.trans", &own, loadTogether<true>);
}

// --- copies, barriers, launches ------------------------------------------------------------------
inline void cp_async_cg_shared_global(uint32_t to, void const* from, unsigned bytes,
                                      unsigned valid_bytes) {
  copyAsync(to, from, bytes, valid_bytes);
}
inline void cp_async_cg_shared_global_L2_128B(uint32_t to, void const* from, unsigned bytes,
                                              unsigned valid_bytes) {
  copyAsync(to, from, bytes, valid_bytes);
}
inline void cp_async_cg_shared_global(uint32_t to, void const* from, unsigned bytes) {
  copyAsync(to, from, bytes, bytes);
}
inline void cp_async_ca_shared_global(uint32_t to, void const* from, unsigned bytes) {
  copyAsync(to, from, bytes, bytes);
}
inline void cp_async_commit_group() { commitCopies(); }
inline void cp_async_wait_group(int num_pending) { waitForCopies(num_pending); }
inline void cp_async_wait_all() { waitForCopies(-1); }
inline void prefetch_global_L2_evict_last(void const*) {}

inline void barrier_sync(unsigned id, unsigned num_threads) { barrier(id, num_threads); }
inline void griddepcontrol_wait() { waitForPredecessor(); }
inline void griddepcontrol_launch_dependents() {}

}  // namespace emulator::ptx
