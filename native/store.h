// The K/V store: memory owned by the caller, its layout, and the moves of rows and whole blocks.
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

  std::byte* at(int64_t element) const { return data + element * size_of(dtype); }
  // The rows of a slot, head_dim elements each: from and to contiguous memory.
  void put(RowPlace place, const std::byte* row) const;
  void get(RowPlace place, std::byte* row) const;
};

// copies: int64 [count, 3], rows (source, destination, filled slots); every layer, K and V.
void copy_blocks(const Store& store, const int64_t* copies, int64_t count);

// out: [count, L, 2, B, G, D] in the store's type.
void read_blocks(const Store& store, const int64_t* ids, int64_t count, std::byte* out);
void write_blocks(const Store& store, const int64_t* ids, int64_t count, const std::byte* data);

}  // namespace pagedkv
