// Where K and V of a token lie: the one place with page, unit and offset arithmetic.
//
// A unit is [unit_slots, 2 (K, V), page_size, num_kv_heads, head_dim]; a sequence's pages are unit
// ids in its row of the block table. Unit 0 is null: it and ids outside the pool hold no tokens.
// Plain C++ but for the qualifiers, so that a host test can call it.
#pragma once

#include <cstdint>

#include "looptrt/divider.cuh"

namespace looptrt {

// A layer's slot of every unit: strides and offsets in elements.
class LayerSlot {
 public:
  LOOPTRT_HOST_DEVICE LayerSlot(int32_t unit_slots, int32_t slot, int32_t page_size,
                                int32_t num_kv_heads, int32_t head_dim)
      : token_stride_(num_kv_heads * head_dim),
        head_dim_(head_dim),
        half_stride_(int64_t{page_size} * token_stride_),
        unit_stride_(2 * unit_slots * half_stride_),
        begin_(2 * slot * half_stride_) {}

  LOOPTRT_HOST_DEVICE int32_t tokenStride() const { return token_stride_; }
  // From a token's K to its V.
  LOOPTRT_HOST_DEVICE int64_t halfStride() const { return half_stride_; }
  // K of a token's kv head, from the start of the pool.
  LOOPTRT_HOST_DEVICE int64_t offset(int32_t unit, int32_t token, int32_t kv_head) const {
    return unit * unit_stride_ + begin_ + int64_t{token} * token_stride_ + kv_head * head_dim_;
  }

 private:
  int32_t token_stride_, head_dim_;
  int64_t half_stride_, unit_stride_, begin_;
};

// Pages of positions, which are not negative, and their tokens there.
class PageDivider {
 public:
  explicit PageDivider(int32_t page_size) : pages_(page_size) {}
  LOOPTRT_HOST_DEVICE int32_t page(int32_t position) const { return pages_.quotient(position); }
  LOOPTRT_HOST_DEVICE int32_t token(int32_t position) const { return pages_.remainder(position); }

 private:
  Divider pages_;
};

// Whether an entry of a block table names a unit that holds tokens.
LOOPTRT_HOST_DEVICE bool isUnit(int32_t entry, int64_t num_units) {
  return entry > 0 && entry < num_units;
}

// Unit of a page, or 0 where there is none. table: the sequence's row, or null.
LOOPTRT_HOST_DEVICE int32_t unitOf(int32_t const* table, int32_t page, int64_t num_units) {
  int32_t const entry = table == nullptr ? 0 : table[page];
  return isUnit(entry, num_units) ? entry : 0;
}

}  // namespace looptrt
