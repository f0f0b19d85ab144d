// PTX instructions that the kernels write out, one function each: the instruction's name with _ for
// every other sign, its operands in PTX's order, all braces opened. build.py makes the calls.
//
// Rounding is IEEE's, as in PTX; ex2.approx is exp2f, whose last bits are not a GPU's. A product of
// the tensor cores is summed in float64 and rounded once, where a GPU cuts: its last bits differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

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

// --- products of a warpgroup ---------------------------------------------------------------------
// Every warp of the group makes its own 16 rows; of the hardware, only when is left open.
struct GroupOperands {
  float* d[48];
  uint32_t const* a[4];  // null: a lies in shared memory
  uint64_t a_tile, b_tile;
  int num_columns;
  bool is_b_transposed;
};

// The element in a row and column of a tile in shared memory that a descriptor is of. Rows run
// along the columns of 16-byte chunks, unless it is transposed.
template <typename T>
float elementOfTile(uint64_t tile, int row, int k, bool is_transposed) {
  auto const field = [&](int shift) { return static_cast<uint32_t>(tile >> shift & 0x3fff) << 4; };
  uint32_t const swizzle = tile >> 62;  // 1: 128 bytes, 2: 64 bytes
  if (swizzle != 1 && swizzle != 2) fail("wgmma with swizzle %u", swizzle);
  uint32_t const row_bytes = swizzle == 1 ? 128 : 64;
  int const slab = static_cast<int>(row_bytes) / 2;
  uint32_t const leading = field(16), stride = field(32);
  uint32_t const place =
      is_transposed ? row / slab * leading + row % slab * 2 + k / 8 * stride + k % 8 * row_bytes
                    : row / 8 * stride + row % 8 * row_bytes + k * 2;
  uint32_t const address = field(0) + place;
  uint32_t const exchanged = address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
  T element;
  std::memcpy(&element, bytesOfShared(exchanged, 2), 2);
  return wide(element);
}

template <typename T>
void multiplyGroup(void* const* lanes) {
  auto const& first = *static_cast<GroupOperands const*>(lanes[0]);
  float a[16][16];
  for (int lane = 0; lane < 32; ++lane) {
    auto const& own = *static_cast<GroupOperands const*>(lanes[lane]);
    for (int i = 0; i < 8; ++i) {
      int const row = lane / 4 + i / 2 % 2 * 8;
      int const k = lane % 4 * 2 + i % 2 + i / 4 * 8;
      int const group_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + row;
      a[row][k] = own.a[0] == nullptr ? elementOfTile<T>(own.a_tile, group_row, k, false)
                                      : wide(elementOf<T>(*own.a[i / 2], i % 2));
    }
  }
  for (int column = 0; column < first.num_columns; ++column) {
    float b[16];
    for (int k = 0; k < 16; ++k) {
      b[k] = elementOfTile<T>(first.b_tile, column, k, first.is_b_transposed);
    }
    for (int row = 0; row < 16; ++row) {
      auto const& owner = *static_cast<GroupOperands const*>(lanes[row % 8 * 4 + column % 8 / 2]);
      float& d = *owner.d[column / 8 * 4 + row / 8 * 2 + column % 2];
      double sum = d;
      for (int k = 0; k < 16; ++k) sum += double{a[row][k]} * b[k];
      d = static_cast<float>(sum);
    }
  }
}

template <typename T>
void startOwn(GroupOperands own) {
  multiplyAsync([own]() mutable { together("wgmma", &own, multiplyGroup<T>); });
}

// kColumns / 2 accumulators, four registers or the tile of a, the tile of b, scales,
// transpositions.
template <typename T, int kColumns, size_t... kAccumulators, typename Operands>
void startGroupOf(Operands const& all, std::index_sequence<kAccumulators...>) {
  constexpr size_t kNext = kColumns / 2;
  constexpr bool kIsShared = std::tuple_size_v<Operands> == kNext + 7;
  GroupOperands own{{&std::get<kAccumulators>(all)...}, {}, 0, 0, kColumns, false};
  if constexpr (kIsShared) {
    own.a_tile = std::get<kNext>(all);
    own.b_tile = std::get<kNext + 1>(all);
    own.is_b_transposed = std::get<kNext + 6>(all) != 0;
  } else {
    own.a[0] = &std::get<kNext>(all);
    own.a[1] = &std::get<kNext + 1>(all);
    own.a[2] = &std::get<kNext + 2>(all);
    own.a[3] = &std::get<kNext + 3>(all);
    own.b_tile = std::get<kNext + 4>(all);
    own.is_b_transposed = std::get<kNext + 8>(all) != 0;
  }
  startOwn<T>(own);
}
template <typename T, int kColumns, typename... Operands>
void startGroup(Operands&&... operands) {
  startGroupOf<T, kColumns>(std::forward_as_tuple(operands...),
                            std::make_index_sequence<kColumns / 2>{});
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n64k16_f32_bf16_bf16(Operands&&... operands) {
  startGroup<__nv_bfloat16, 64>(operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n64k16_f32_f16_f16(Operands&&... operands) {
  startGroup<__half, 64>(operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n96k16_f32_bf16_bf16(Operands&&... operands) {
  startGroup<__nv_bfloat16, 96>(operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n96k16_f32_f16_f16(Operands&&... operands) {
  startGroup<__half, 96>(operands...);
}
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() {}
inline void wgmma_wait_group_sync_aligned(int) { waitForProducts(); }
inline void fence_proxy_async_shared_cta() {}

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
inline void createpolicy_fractional_L2_evict_last_b64(uint64_t& policy, float) { policy = 0; }
template <typename T, int kSize>
void loadInto(T* const (&to)[kSize], void const* from) {
  for (int i = 0; i < kSize; ++i) *to[i] = static_cast<T const*>(from)[i];
}
inline void ld_global_cg_L2_cache_hint_b16(uint16_t& d, void const* from, uint64_t) {
  loadInto({&d}, from);
}
inline void ld_global_cg_L2_cache_hint_b32(uint32_t& d, void const* from, uint64_t) {
  loadInto({&d}, from);
}
inline void ld_global_cg_L2_cache_hint_v2_b32(uint32_t& d0, uint32_t& d1, void const* from,
                                              uint64_t) {
  loadInto({&d0, &d1}, from);
}
inline void st_global_L2_cache_hint_b32(void* to, uint32_t value, uint64_t) {
  *static_cast<uint32_t*>(to) = value;
}
inline void st_global_L2_cache_hint_v2_b32(void* to, uint32_t low, uint32_t high, uint64_t) {
  static_cast<uint32_t*>(to)[0] = low;
  static_cast<uint32_t*>(to)[1] = high;
}

inline void barrier_sync(unsigned id, unsigned num_threads) { barrier(id, num_threads); }
inline void griddepcontrol_wait() { waitForPredecessor(); }
inline void griddepcontrol_launch_dependents() {}

}  // namespace emulator::ptx
