// Where the tensor-core kernels of packed_plane_attention read and store K and V.
//
// Tokens of this call are read from their rows of qkv, never from the pool: no block waits for
// another one's stores. What is nowhere is zeros.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "packed_plane_attention_forms.cuh"

namespace looptrt {

// K and V of a key and kv head, in chunks of 16 bytes; null where they are zeros.
struct alignas(16) KeySource {
  uint4 const* key;
  uint4 const* value;
};

// A sequence as its keys are looked up.
struct KeyLookup {
  int32_t const* table;
  RowRange rows;                // of this call; their positions rise
  int32_t first_new, last_new;  // positions of the first and the last of them
  int32_t kv_head;

  __device__ __forceinline__ bool hasGaps() const {
    return last_new - first_new != rows.end - rows.begin - 1;
  }
};

// The row that stands at a position, or -1.
__device__ __forceinline__ int newRowAt(AttentionArgs const& args, KeyLookup const& lookup,
                                        int position) {
  if (position < lookup.first_new || position > lookup.last_new) return -1;
  if (!lookup.hasGaps()) return lookup.rows.begin + (position - lookup.first_new);
  int low = lookup.rows.begin;
  int high = lookup.rows.end - 1;
  while (low < high) {
    int const middle = (low + high) / 2;
    if (args.p.positions[middle] >= position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return args.p.positions[low] == position ? low : -1;
}

// The pool, read once.
template <typename T>
struct KvPool {
  T* base;
  int64_t num_units;

  __device__ __forceinline__ explicit KvPool(AttentionArgs const& args)
      : base(reinterpret_cast<T*>(args.p.kv_pool[0])), num_units(args.p.kv_pool[1]) {}
};

// The table's entry for a key; the null unit past last_key.
__device__ __forceinline__ int32_t entryOf(AttentionArgs const& args, KeyLookup const& lookup,
                                           int key, int last_key) {
  return key > last_key || lookup.table == nullptr ? 0 : lookup.table[args.pages.page(key)];
}

// Source of a key, given its entryOf; zeros where that is no unit.
template <typename T>
__device__ __forceinline__ KeySource sourceOf(AttentionArgs const& args, KvPool<T> const& pool,
                                              KeyLookup const& lookup, int32_t entry, int key) {
  // The entry, which may still be on its way, is used as late as can be.
  int const row = newRowAt(args, lookup, key);
  bool const is_new = row >= 0;
  T const* const base = is_new ? static_cast<T const*>(args.p.qkv) : pool.base;
  int64_t const value_step = is_new ? args.layer.tokenStride() : args.layer.halfStride();
  int64_t const offset = is_new ? newKeyOffset(args, row, lookup.kv_head)
                                : args.layer.offset(entry, args.pages.token(key), lookup.kv_head);
  if (!isUnit(entry, pool.num_units)) return {nullptr, nullptr};
  T const* const from = base + offset;
  return {reinterpret_cast<uint4 const*>(from), reinterpret_cast<uint4 const*>(from + value_step)};
}

// Where K of the token at a position inside the table is to be stored: null unless it is one of the
// lookup's rows and its unit is not null. Its V lies args.layer.halfStride() elements on.
template <typename T>
__device__ __forceinline__ T* placeOf(AttentionArgs const& args, KeyLookup const& lookup,
                                      int position) {
  if (newRowAt(args, lookup, position) < 0) return nullptr;
  int64_t const offset = kvOffset(args, lookup.table, args.p.kv_pool[1], position, lookup.kv_head);
  return offset < 0 ? nullptr : reinterpret_cast<T*>(args.p.kv_pool[0]) + offset;
}

}  // namespace looptrt
