// Where K and V of a slot lie in the store. Every product here is 64-bit: block ids reach 2^20 and
// strides 2^13 and more, so a 32-bit product would wrap.
#pragma once

#include <cstdint>

namespace pagedkv {

constexpr int kMaxHeadDim = 256;
// Heads are padded to a multiple of this, with zeros.
constexpr int kLanes = 8;
// Slots that are packed together: as many 4-byte lanes as the widest register has.
constexpr int kGroup = 16;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

enum class DType { kFloat32, kBfloat16 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
// Elements of a 4-byte lane.
constexpr int64_t step_of(DType dtype) { return 4 / size_of(dtype); }

// How the elements of a slot's row lie: pieces of `piece`, `stride` apart, the first at `offset`.
struct RowPlace {
  int64_t offset, piece, stride;
};

// The store is [L, N + 1 blocks, G, 2 (K, V), B * padded D] elements. Within K and V, where the
// block size is a multiple of kGroup, groups of kGroup slots are packed for the kernels, `step`
// elements a lane: K [D / step][kGroup slots][step], V [kGroup / step][D][step slots]. Other block
// sizes have rows, [B][D], which a span is packed from whenever it is read.
struct Layout {
  int64_t num_layers;
  int64_t num_blocks_and_null;  // N + 1
  int64_t num_kv_heads;         // G
  int64_t block_size;           // B
  int64_t padded_dim;           // D
  int64_t step;

  bool packed() const { return block_size % kGroup == 0; }

  // Elements of a group, of K or V of a head's block, and between heads, blocks and layers.
  int64_t group_stride() const { return kGroup * padded_dim; }
  int64_t value_stride() const { return block_size * padded_dim; }
  int64_t head_stride() const { return 2 * value_stride(); }
  int64_t block_stride() const { return num_kv_heads * head_stride(); }
  int64_t layer_stride() const { return num_blocks_and_null * block_stride(); }

  // K of a head's block, in elements; V follows it.
  int64_t offset(int64_t layer, int64_t block, int64_t head) const {
    return layer * layer_stride() + block * block_stride() + head * head_stride();
  }

  RowPlace key(int64_t layer, int64_t block, int64_t slot, int64_t head) const {
    const int64_t base = offset(layer, block, head);
    if (!packed()) return {base + slot * padded_dim, padded_dim, padded_dim};
    const int64_t group = base + slot / kGroup * group_stride();
    return {group + slot % kGroup * step, step, kGroup * step};
  }

  RowPlace value(int64_t layer, int64_t block, int64_t slot, int64_t head) const {
    const int64_t base = offset(layer, block, head) + value_stride();
    if (!packed()) return {base + slot * padded_dim, padded_dim, padded_dim};
    return {base + slot / step * step * padded_dim + slot % step, 1, step};
  }
};

}  // namespace pagedkv
