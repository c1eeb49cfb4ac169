#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace pagedkv {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// A state is padded_dim weighted values, then the maximum and the sum.
int64_t state_floats(int64_t padded_dim) { return padded_dim + kLanes; }

// Where the rows of one span lie: the walk through the table, once for a whole tile.
struct SpanRows {
  const void* keys[kSpan];
  const void* values[kSpan];
  int count = 0;

  // Positions of `span` up to last_position, at least one.
  void find(const Store& store, int64_t layer, int64_t head, const int32_t* table, int64_t span,
            int64_t last_position) {
    const int64_t block_size = store.layout.block_size;
    const int64_t step = store.layout.slot_stride() * size_of(store.dtype);
    const int64_t start = span * kSpan;
    count = static_cast<int>(std::min<int64_t>(last_position + 1 - start, kSpan));
    for (int j = 0; j < count;) {
      int64_t slot = (start + j) % block_size;
      const int64_t block = table[(start + j) / block_size];
      const std::byte* key = store.at(layer, 0, block, slot, head);
      const std::byte* value = store.at(layer, 1, block, slot, head);
      for (; j < count && slot < block_size; ++j, ++slot, key += step, value += step) {
        keys[j] = key;
        values[j] = value;
      }
    }
    for (int j = count; j % kKeyGroup; ++j) {
      keys[j] = keys[count - 1];
      values[j] = values[count - 1];
    }
  }
};

}  // namespace

// What one thread works in: pieces of its part of the workspace.
struct Attention::Scratch {
  float* queries;      // [kTile, padded_dim]
  float* accumulated;  // [kTile, padded_dim]
  float* converted;    // [2, kSpan, padded_dim]
  float* scores;       // [kScoreRows, kSpan]
  float* maximum;      // [kTile]
  float* sum;          // [kTile]
  float* states;       // shared by the threads

  static int64_t floats(int64_t padded_dim) {
    return (2 * kTile + 2 * kSpan) * padded_dim + kScoreRows * kSpan + 2 * kTile;
  }

  Scratch(float* memory, float* shared, int64_t padded_dim) {
    queries = memory;
    accumulated = queries + kTile * padded_dim;
    converted = accumulated + kTile * padded_dim;
    scores = converted + 2 * kSpan * padded_dim;
    maximum = scores + kScoreRows * kSpan;
    sum = maximum + kTile;
    states = shared;
  }

  void clear(int64_t count, int64_t padded_dim) {
    std::fill_n(maximum, count, kEmpty);
    std::fill_n(sum, count, 0.0f);
    std::fill_n(accumulated, count * padded_dim, 0.0f);
  }
};

void Workspace::reserve(const Plan& plan, int64_t padded_dim) {
  thread_floats_ = round_up(Attention::scratch_floats(padded_dim), 16);
  const size_t threads = static_cast<size_t>(thread_floats_ * plan.max_threads() + 16);
  const size_t states = static_cast<size_t>(plan.num_states() * state_floats(padded_dim));
  if (threads_.size() < threads) threads_.resize(threads);
  if (states_.size() < states) states_.resize(states);
}

int64_t Attention::scratch_floats(int64_t padded_dim) { return Scratch::floats(padded_dim); }

Attention::Attention(const Store& store, const Kernels& kernels, int64_t num_heads, float scale)
    : store_(store), kernels_(kernels), num_heads_(num_heads), scale_(scale) {}

Shape Attention::shape() const {
  const Layout& layout = store_.layout;
  return {num_heads_, layout.num_kv_heads, layout.block_size, layout.padded_dim};
}

void Attention::run(const Plan& plan, int64_t layer, Tokens q, Tokens k, Tokens v, Tokens out) {
  const int64_t num_tokens = static_cast<int64_t>(plan.slots().size());
#pragma omp parallel num_threads(plan.num_threads())
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < num_tokens; ++token) write(plan, layer, token, k, v);
    attend(plan, layer, q, out);
  }
}

void Attention::attend(const Plan& plan, int64_t layer, Tokens q, Tokens out) {
  const int64_t num_items = static_cast<int64_t>(plan.items().size());
  const int64_t num_rests = static_cast<int64_t>(plan.rests().size());
  Scratch scratch(workspace_.thread(omp_get_thread_num()), workspace_.states(),
                  store_.layout.padded_dim);
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t i = 0; i < num_items; ++i) attend(plan, plan.items()[i], layer, q, out, scratch);
  if (num_rests) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < num_rests; ++i) attend(plan, plan.rests()[i], layer, q, out, scratch);
  }
}

void Attention::write(const Plan& plan, int64_t layer, int64_t token, Tokens k, Tokens v) const {
  const int64_t size = size_of(store_.dtype);
  const int64_t block = plan.slots()[token] / store_.layout.block_size;
  const int64_t slot = plan.slots()[token] % store_.layout.block_size;
  const Tokens sources[] = {k, v};
  for (int value = 0; value < 2; ++value) {
    const Tokens& from = sources[value];
    for (int64_t head = 0; head < store_.layout.num_kv_heads; ++head) {
      std::memcpy(store_.at(layer, value, block, slot, head),
                  from.data + (token * from.token_stride + head * from.head_stride) * size,
                  static_cast<size_t>(store_.head_dim * size));
    }
  }
}

void Attention::attend(const Plan& plan, const Item& item, int64_t layer, Tokens q, Tokens out,
                       Scratch& scratch) const {
  const int64_t group = num_heads_ / store_.layout.num_kv_heads;
  const int64_t padded_dim = store_.layout.padded_dim;
  const int64_t size = size_of(store_.dtype);
  const int32_t* vectors = plan.vectors().data() + item.first;
  const int count = item.end - item.first;
  int64_t seen[kTile];
  for (int i = 0; i < count; ++i) {
    const int64_t token = vectors[i] / group;
    const int64_t head = item.head * group + vectors[i] % group;
    seen[i] = plan.seen(token);
    kernels_.load_query(q.data + (token * q.token_stride + head * q.head_stride) * size, scale_,
                        static_cast<int>(store_.head_dim), static_cast<int>(padded_dim),
                        scratch.queries + i * padded_dim);
  }
  scratch.clear(count, padded_dim);
  if (item.role == Item::kRest) take_up(plan, item, scratch);

  // The last vector sees the most, or all see the item's spans whole.
  const int64_t last_seen = seen[count - 1] - 1;
  SpanRows rows[2];  // of the current span and of the next
  if (item.first_span < item.end_span) {
    rows[item.first_span % 2].find(store_, layer, item.head, plan.table(item.row),
                                   item.first_span, last_seen);
  }
  int32_t limits[kTile];
  for (int64_t span = item.first_span; span < item.end_span; ++span) {
    int first = 0;
    for (int i = 0; i < count; ++i) {
      limits[i] = static_cast<int32_t>(std::clamp<int64_t>(seen[i] - span * kSpan, 0, kSpan));
      first += limits[i] == 0;
    }
    const SpanRows& now = rows[span % 2];
    SpanRows& next = rows[(span + 1) % 2];
    next.count = 0;
    if (span + 1 < item.end_span) {
      next.find(store_, layer, item.head, plan.table(item.row), span + 1, last_seen);
    }
    kernels_.attend_span({now.keys, now.values, next.keys, next.count, scratch.queries, limits,
                          first, count, static_cast<int>(padded_dim), scratch.scores,
                          scratch.converted, scratch.maximum, scratch.sum, scratch.accumulated});
    if (item.role == Item::kPart) put_down(plan, item, span, first, scratch);
  }
  if (item.role == Item::kPart) return;
  for (int i = 0; i < count; ++i) {
    const int64_t token = vectors[i] / group;
    const int64_t head = item.head * group + vectors[i] % group;
    kernels_.store_output(scratch.accumulated + i * padded_dim, scratch.sum[i],
                          static_cast<int>(store_.head_dim),
                          out.data + (token * out.token_stride + head * out.head_stride) * size);
  }
}

// Merges what parts put down, in the order of positions: the order of an item that is whole.
void Attention::take_up(const Plan& plan, const Item& item, Scratch& scratch) const {
  const int64_t padded_dim = store_.layout.padded_dim;
  for (int i = 0; i < item.end - item.first; ++i) {
    const States& states = plan.states(plan.vectors()[item.first + i]);
    const float* state = scratch.states + states.index(item.head, 0) * state_floats(padded_dim);
    for (int j = 0; j < states.count; ++j, state += state_floats(padded_dim)) {
      kernels_.merge(static_cast<int>(padded_dim), state[padded_dim], state[padded_dim + 1], state,
                     scratch.maximum + i, scratch.sum + i, scratch.accumulated + i * padded_dim);
    }
  }
}

// A part that starts at the first position keeps one state to its end, as a whole item does; any
// other has one a span, since a merge of merged states would round in another order.
// Vectors before `first` saw nothing of the span.
void Attention::put_down(const Plan& plan, const Item& item, int64_t span, int first,
                         Scratch& scratch) const {
  const int64_t padded_dim = store_.layout.padded_dim;
  const int count = item.end - item.first;
  if (item.first_span == 0) {
    if (span + 1 < item.end_span) return;
    first = 0;
  }
  for (int i = first; i < count; ++i) {
    const States& states = plan.states(plan.vectors()[item.first + i]);
    float* state = scratch.states + states.index(item.head, span) * state_floats(padded_dim);
    std::copy_n(scratch.accumulated + i * padded_dim, padded_dim, state);
    state[padded_dim] = scratch.maximum[i];
    state[padded_dim + 1] = scratch.sum[i];
  }
  scratch.clear(count, padded_dim);
}

}  // namespace pagedkv
