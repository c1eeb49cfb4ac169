#include <cstring>

#include "store.h"

namespace pagedkv {

void copy_blocks(const Store& store, const int64_t* copies, int64_t count) {
  const Layout& layout = store.layout;
#pragma omp parallel for collapse(2) schedule(static) if (count > 8)
  for (int64_t plane = 0; plane < layout.num_layers * 2; ++plane) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t source = copies[i * 3], destination = copies[i * 3 + 1];
      const int64_t bytes = copies[i * 3 + 2] * layout.slot_stride() * size_of(store.dtype);
      for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
        std::memcpy(store.at(plane / 2, plane % 2, destination, 0, head),
                    store.at(plane / 2, plane % 2, source, 0, head), bytes);
      }
    }
  }
}

namespace {

// Calls move(store's head row, canonical head row) for every head of every slot.
template <typename Move>
void for_each_row(const Store& store, const int64_t* ids, int64_t count, Move move) {
  const Layout& layout = store.layout;
  const int64_t row_bytes = store.head_dim * size_of(store.dtype);
  const int64_t plane_rows = layout.block_size * layout.num_kv_heads;
#pragma omp parallel for collapse(2) schedule(static) if (count > 8)
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t plane = 0; plane < layout.num_layers * 2; ++plane) {
      int64_t at = ((i * layout.num_layers * 2 + plane) * plane_rows) * row_bytes;
      for (int64_t slot = 0; slot < layout.block_size; ++slot) {
        for (int64_t head = 0; head < layout.num_kv_heads; ++head, at += row_bytes) {
          move(store.at(plane / 2, plane % 2, ids[i], slot, head), at, row_bytes);
        }
      }
    }
  }
}

}  // namespace

void read_blocks(const Store& store, const int64_t* ids, int64_t count, std::byte* out) {
  for_each_row(store, ids, count, [out](const std::byte* row, int64_t at, int64_t bytes) {
    std::memcpy(out + at, row, bytes);
  });
}

void write_blocks(const Store& store, const int64_t* ids, int64_t count, const std::byte* data) {
  for_each_row(store, ids, count, [data](std::byte* row, int64_t at, int64_t bytes) {
    std::memcpy(row, data + at, bytes);
  });
}

}  // namespace pagedkv
