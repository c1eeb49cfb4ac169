// Attention over the block table: the plan of a step, and the run of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "barrier.h"
#include "kernels.h"
#include "store.h"

namespace pagedkv {

struct Shape {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t padded_dim;
};

// One unit of parallel work: a tile of query vectors of one K/V head over some spans.
struct Item {
  enum Role {
    kWhole,  // all that its vectors see: writes the output
    kPart,   // spans in the middle, or common to several rows: puts states down
    kRest,   // takes up the states of its vectors, adds its own spans, writes the output
  };
  Role role;
  int32_t row;  // whose table leads to the keys
  int32_t head;
  int32_t first, end;  // of Plan::vectors()
  int32_t first_span, end_span;
};

// The states that parts put down for a query vector, in the order of positions: one for the spans
// before `whole_spans` together, then one a span. `count` of them for each K/V head.
struct States {
  int64_t first = 0;
  int32_t whole_spans = 0;
  int32_t count = 0;

  int64_t index(int64_t head, int64_t span) const {
    return first + head * count + (span < whole_spans ? 0 : span - whole_spans + 1);
  }
};

// Host work of a step, done once: its own copy of the batch, and the items. Immutable.
// The arguments are valid by contract (lengths, ids and slots were checked before).
// A query vector is token * (H/G) + (query head mod H/G); each stands for one vector a K/V head.
class Plan {
 public:
  // `share`: spans that lie in the same blocks for several rows are read once for all of them.
  Plan(const Shape& shape, std::vector<int32_t> query_lens, std::vector<int32_t> context_lens,
       std::vector<int32_t> tables, int64_t width, std::vector<int64_t> slots, int num_threads,
       bool share);

  const std::vector<Item>& items() const { return items_; }  // wholes and parts
  const std::vector<Item>& rests() const { return rests_; }  // to be done after those
  const std::vector<int32_t>& vectors() const { return vectors_; }
  const States& states(int32_t vector) const { return states_[vector]; }
  const std::vector<int64_t>& slots() const { return slots_; }
  const int32_t* table(int64_t row) const { return tables_.data() + row * width_; }
  int64_t seen(int64_t token) const { return seen_[token]; }
  // Threads that are worth waking for attention alone, and those that it has room for.
  int num_threads() const { return num_threads_; }
  int max_threads() const { return max_threads_; }
  int64_t num_states() const { return num_states_; }
  // Spans that are read once for several rows, counted once a group of rows.
  int64_t num_shared_spans() const { return num_shared_spans_; }

 private:
  // Query vectors that walk through `row`'s table together, over the spans that are theirs alone
  // or, of several rows, common.
  struct Tile {
    int32_t row;
    int32_t first, end;  // of vectors_
    int32_t first_span, end_span;
    bool common;
  };

  std::vector<Tile> tiles(const Shape& shape, bool share);
  void add_tile(const Tile& tile, int32_t num_kv_heads, int64_t dearest);
  void add_parts(const Tile& tile, int32_t num_kv_heads, int32_t chunk);

  int32_t group_;
  std::vector<int32_t> query_lens_, context_lens_, tables_;
  int64_t width_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> seen_;     // positions that a token sees, itself included
  std::vector<int32_t> vectors_;  // all of them in order, then those of common tiles
  std::vector<States> states_;    // of a vector
  int max_threads_;
  int num_threads_;
  int64_t num_states_ = 0;
  int64_t num_shared_spans_ = 0;
  std::vector<Item> items_, rests_;
};

// [T, heads, D]: strides in elements, the last dimension contiguous.
struct Tokens {
  std::byte* data;
  int64_t token_stride;
  int64_t head_stride;

  // `size`: bytes of an element.
  std::byte* row(int64_t token, int64_t head, int64_t size) const {
    return data + (token * token_stride + head * head_stride) * size;
  }
};

// Scratch for the threads of a run and for the states of parts. Grows with the plans, never in `run`.
class Workspace {
 public:
  void reserve(const Plan& plan, int64_t padded_dim);
  // Aligned to 64 bytes.
  float* thread(int index) {
    const auto base = (reinterpret_cast<uintptr_t>(threads_.data()) + 63) / 64 * 64;
    return reinterpret_cast<float*>(base) + index * thread_floats_;
  }
  float* states() { return states_.data(); }

 private:
  int64_t thread_floats_ = 0;
  std::vector<float> threads_, states_;
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

  // The two halves of `run`, for callers with a parallel region of their own, of at most
  // plan.max_threads() threads. All threads meet between the writes of a layer and its `attend`,
  // which every one of them calls and which does not wait for the others at its end.
  void write(const Plan& plan, int64_t layer, int64_t token, Tokens k, Tokens v) const;
  void attend(const Plan& plan, int64_t layer, Tokens q, Tokens out, Barrier& barrier);

 private:
  struct Scratch;
  void find(const Plan& plan, int64_t row, int64_t layer, int64_t head, int64_t span,
            int64_t last_position, SpanGroups& groups) const;
  void pack(const Plan& plan, int64_t row, int64_t layer, int64_t head, int64_t span,
            int64_t last_position, Scratch& scratch, SpanGroups& groups) const;
  // `after`: what is likely to be attended to next, or nullptr.
  void attend(const Plan& plan, const Item& item, const Item* after, int64_t layer, Tokens q,
              Tokens out, Scratch& scratch) const;
  void take_up(const Plan& plan, const Item& item, Scratch& scratch) const;
  void put_down(const Plan& plan, const Item& item, int64_t span, int first,
                Scratch& scratch) const;

  Store store_;
  const Kernels& kernels_;
  int64_t num_heads_;
  float scale_;
  Workspace workspace_;
};

}  // namespace pagedkv
