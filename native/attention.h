// Attention over the block table: the plan of a step, and the run of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "store.h"

namespace pagedkv {

struct Shape {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t padded_dim;
};

// One unit of parallel work: a tile of a row's query vectors of one K/V head over some spans.
// A row with n new tokens has n * H/G vectors for a K/V head, position-major.
struct Item {
  int32_t row;
  int32_t head;
  int32_t first_vector, end_vector;
  int32_t first_span, end_span;
  int64_t partials;  // index of the first partial state, or -1: the item is the whole context
};

// A tile that was split over spans: its partial states, to be merged in order.
struct Merge {
  int32_t row;
  int32_t head;
  int32_t first_vector, end_vector;
  int32_t num_spans;
  int64_t partials;
};

// Host work of a step, done once: its own copy of the batch, and the items. Immutable.
// The arguments are valid by contract (lengths, ids and slots were checked before).
class Plan {
 public:
  Plan(const Shape& shape, std::vector<int32_t> query_lens, std::vector<int32_t> context_lens,
       std::vector<int32_t> tables, int64_t width, std::vector<int64_t> slots, int num_threads);

  const std::vector<Item>& items() const { return items_; }
  const std::vector<Merge>& merges() const { return merges_; }
  const std::vector<int64_t>& slots() const { return slots_; }
  const int32_t* table(int64_t row) const { return tables_.data() + row * width_; }
  int64_t first_token(int64_t row) const { return first_tokens_[row]; }
  int64_t query_len(int64_t row) const { return query_lens_[row]; }
  int64_t context_len(int64_t row) const { return context_lens_[row]; }
  int num_threads() const { return num_threads_; }
  int64_t num_partials() const { return num_partials_; }

 private:
  void add_tile(const Shape& shape, int32_t row, int32_t head, int32_t first, int32_t end,
                int32_t chunk);

  std::vector<int32_t> query_lens_, context_lens_, tables_;
  int64_t width_;
  std::vector<int64_t> slots_, first_tokens_;
  int num_threads_;
  int64_t num_partials_ = 0;
  std::vector<Item> items_;
  std::vector<Merge> merges_;
};

// [T, heads, D]: strides in elements, the last dimension contiguous.
struct Tokens {
  std::byte* data;
  int64_t token_stride;
  int64_t head_stride;
};

// Scratch for the threads of a run and for partial states. Grows with the plans, never in `run`.
class Workspace {
 public:
  void reserve(const Plan& plan, int64_t padded_dim);
  float* thread(int index) { return threads_.data() + index * thread_floats_; }
  float* partials() { return partials_.data(); }

 private:
  int64_t thread_floats_ = 0;
  std::vector<float> threads_, partials_;
};

class Attention {
 public:
  Attention(const Store& store, const Kernels& kernels, int64_t num_heads, float scale);

  const Store& store() const { return store_; }
  Shape shape() const;
  static int64_t scratch_floats(int64_t padded_dim);  // that one thread works in
  // Must be called for a plan before its first run.
  void prepare(const Plan& plan) { workspace_.reserve(plan, store_.layout.padded_dim); }
  // Writes k, v to the plan's slots, then attends. One run at a time.
  void run(const Plan& plan, int64_t layer, Tokens q, Tokens k, Tokens v, Tokens out);

 private:
  struct Scratch;
  void write(const Plan& plan, int64_t layer, int64_t token, Tokens k, Tokens v) const;
  void attend(const Plan& plan, const Item& item, int64_t layer, Tokens q, Tokens out,
              Scratch& scratch);
  void finish(const Plan& plan, const Merge& merge, Tokens out, Scratch& scratch);
  void put(const Plan& plan, int64_t row, int64_t head, int64_t vector, const float* accumulated,
           float sum, Tokens out) const;

  Store store_;
  const Kernels& kernels_;
  int64_t num_heads_;
  float scale_;
  Workspace workspace_;
};

}  // namespace pagedkv
