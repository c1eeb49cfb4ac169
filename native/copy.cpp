#include <cstring>

#include "store.h"

namespace pagedkv {
namespace {

// Calls move(place in the store, offset in the row, bytes) for each piece of a row, which is inlined
// with the sizes that pieces have.
template <typename Move>
void for_each_piece(const Store& store, RowPlace place, Move move) {
  const int64_t size = size_of(store.dtype), bytes = store.head_dim * size;
  const int64_t piece = place.piece * size, stride = place.stride * size;
  std::byte* at = store.at(place.offset);
  int64_t row = 0;
  if (piece == 2) {
    for (; row < bytes; row += 2, at += stride) move(at, row, 2);
  } else if (piece == 4) {
    for (; row + 4 <= bytes; row += 4, at += stride) move(at, row, 4);
    if (row < bytes) move(at, row, bytes - row);
  } else {
    move(at, 0, bytes);
  }
}

}  // namespace

void Store::put(RowPlace place, const std::byte* row) const {
  for_each_piece(*this, place, [row](std::byte* at, int64_t from, int64_t bytes) {
    std::memcpy(at, row + from, bytes);
  });
}

void Store::get(RowPlace place, std::byte* row) const {
  for_each_piece(*this, place, [row](const std::byte* at, int64_t to, int64_t bytes) {
    std::memcpy(row + to, at, bytes);
  });
}

void copy_blocks(const Store& store, const int64_t* copies, int64_t count) {
  const Layout& layout = store.layout;
  const int64_t heads = layout.num_layers * layout.num_kv_heads;
#pragma omp parallel for collapse(2) schedule(static) if (count > 8)
  for (int64_t at = 0; at < heads; ++at) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t layer = at / layout.num_kv_heads, head = at % layout.num_kv_heads;
      const int64_t source = copies[i * 3], destination = copies[i * 3 + 1];
      const int64_t filled = copies[i * 3 + 2];
      if (filled == layout.block_size) {
        std::memcpy(store.at(layout.offset(layer, destination, head)),
                    store.at(layout.offset(layer, source, head)),
                    layout.head_stride() * size_of(store.dtype));
        continue;
      }
      std::byte row[kMaxHeadDim * sizeof(float)];
      for (int64_t slot = 0; slot < filled; ++slot) {
        store.get(layout.key(layer, source, slot, head), row);
        store.put(layout.key(layer, destination, slot, head), row);
        store.get(layout.value(layer, source, slot, head), row);
        store.put(layout.value(layer, destination, slot, head), row);
      }
    }
  }
}

namespace {

// Calls move(place in the store, offset of a canonical row) for K and V of every head and slot.
template <typename Move>
void for_each_row(const Store& store, const int64_t* ids, int64_t count, Move move) {
  const Layout& layout = store.layout;
  const int64_t row_bytes = store.head_dim * size_of(store.dtype);
  const int64_t plane_bytes = layout.block_size * layout.num_kv_heads * row_bytes;
#pragma omp parallel for collapse(2) schedule(static) if (count > 8)
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      int64_t at = (i * layout.num_layers + layer) * 2 * plane_bytes;
      for (int64_t slot = 0; slot < layout.block_size; ++slot) {
        for (int64_t head = 0; head < layout.num_kv_heads; ++head, at += row_bytes) {
          move(layout.key(layer, ids[i], slot, head), at);
          move(layout.value(layer, ids[i], slot, head), at + plane_bytes);
        }
      }
    }
  }
}

}  // namespace

void read_blocks(const Store& store, const int64_t* ids, int64_t count, std::byte* out) {
  for_each_row(store, ids, count,
               [&store, out](RowPlace place, int64_t at) { store.get(place, out + at); });
}

void write_blocks(const Store& store, const int64_t* ids, int64_t count, const std::byte* data) {
  for_each_row(store, ids, count,
               [&store, data](RowPlace place, int64_t at) { store.put(place, data + at); });
}

}  // namespace pagedkv
