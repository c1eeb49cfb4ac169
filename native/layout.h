// Where a slot lies in the K/V store. Every product here is 64-bit: block ids reach 2^20 and
// strides 2^13 and more, so a 32-bit product would wrap.
#pragma once

#include <cstdint>

namespace pagedkv {

constexpr int kMaxHeadDim = 256;
// Heads are padded to whole vectors, with zeros, so that kernels have no remainder over d.
constexpr int kLanes = 8;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

enum class DType { kFloat32, kBfloat16 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The store is [L, 2 (K, V), N + 1 blocks, G, B, padded D], contiguous.
struct Layout {
  int64_t num_layers;
  int64_t num_blocks_and_null;  // N + 1
  int64_t num_kv_heads;         // G
  int64_t block_size;           // B
  int64_t padded_dim;

  // Elements between consecutive slots, heads, blocks, and K/V planes of a layer.
  int64_t slot_stride() const { return padded_dim; }
  int64_t head_stride() const { return block_size * slot_stride(); }
  int64_t block_stride() const { return num_kv_heads * head_stride(); }
  int64_t plane_stride() const { return num_blocks_and_null * block_stride(); }

  // Element offset of a slot of a block within its plane.
  int64_t offset(int64_t block, int64_t slot, int64_t head) const {
    return block * block_stride() + head * head_stride() + slot * slot_stride();
  }

  // Element offset of a plane; `value` is 0 for K and 1 for V.
  int64_t plane(int64_t layer, int64_t value) const {
    return (layer * 2 + value) * plane_stride();
  }
};

}  // namespace pagedkv
