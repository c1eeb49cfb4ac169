// The K/V store: memory owned by the caller, its layout, and the moves of whole blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace pagedkv {

struct Store {
  std::byte* data;
  DType dtype;
  Layout layout;
  int64_t head_dim;

  std::byte* at(int64_t layer, int64_t value, int64_t block, int64_t slot, int64_t head) const {
    const int64_t element = layout.plane(layer, value) + layout.offset(block, slot, head);
    return data + element * size_of(dtype);
  }
};

// copies: int64 [count, 3], rows (source, destination, filled slots); every layer, K and V.
void copy_blocks(const Store& store, const int64_t* copies, int64_t count);

// out: [count, L, 2, B, G, D] in the store's type.
void read_blocks(const Store& store, const int64_t* ids, int64_t count, std::byte* out);
void write_blocks(const Store& store, const int64_t* ids, int64_t count, const std::byte* data);

}  // namespace pagedkv
