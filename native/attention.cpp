#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace pagedkv {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

// A state is padded_state weighted values, then the maximum and the sum.
int64_t state_floats(int64_t padded_dim) { return padded_state(padded_dim) + kGroup; }

// A span in the layout of a store whose blocks are as long.
Layout packed_span(const Layout& layout) { return {1, 1, 1, kSpan, layout.padded_dim, layout.step}; }

}  // namespace

// What one thread works in: pieces of its part of the workspace.
struct Attention::Scratch {
  std::byte* packed;   // one span of K and V, where the store has not packed them
  float* queries;      // [kTile, padded_dim]
  float* accumulated;  // [kTile, padded_state]
  float* scores;       // [kTileRows, kScoreStride]
  float* maximum;      // [kTile]
  float* sum;          // [kTile]
  float* states;       // shared by the threads

  static int64_t floats(int64_t padded_dim) {
    return (2 * kSpan + kTile) * padded_dim + kTile * padded_state(padded_dim) +
           kTileRows * kScoreStride + 2 * kTile;
  }

  Scratch(float* memory, float* shared, int64_t padded_dim) {
    packed = reinterpret_cast<std::byte*>(memory);
    queries = memory + 2 * kSpan * padded_dim;
    scores = queries + kTile * padded_dim;
    accumulated = scores + kTileRows * kScoreStride;
    maximum = accumulated + kTile * padded_state(padded_dim);
    sum = maximum + kTile;
    states = shared;
  }

  void clear(int64_t count, int64_t padded_dim) {
    std::fill_n(maximum, count, kEmpty);
    std::fill_n(sum, count, 0.0f);
    std::fill_n(accumulated, count * padded_state(padded_dim), 0.0f);
  }
};

void Workspace::reserve(const Plan& plan, int64_t padded_dim) {
  thread_floats_ = round_up(Attention::scratch_floats(padded_dim), 16);
  const size_t threads = static_cast<size_t>(thread_floats_ * plan.max_threads() + 16);
  const size_t states = static_cast<size_t>(plan.num_states() * state_floats(padded_dim));
  // As zeros again: what pads K in the scratch must stay zero, and memory that moves with its
  // content may be aligned otherwise.
  if (threads_.size() < threads) threads_.assign(threads, 0.0f);
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
  std::optional<Barrier> started;  // of the threads that OpenMP grants, which may be fewer
#pragma omp parallel num_threads(plan.num_threads())
  {
#pragma omp single
    started.emplace(omp_get_num_threads());
    Barrier& barrier = *started;
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < num_tokens; ++token) write(plan, layer, token, k, v);
    barrier.wait();
    attend(plan, layer, q, out, barrier);
  }
}

void Attention::attend(const Plan& plan, int64_t layer, Tokens q, Tokens out, Barrier& barrier) {
  const int64_t num_items = static_cast<int64_t>(plan.items().size());
  const int64_t num_rests = static_cast<int64_t>(plan.rests().size());
  Scratch scratch(workspace_.thread(omp_get_thread_num()), workspace_.states(),
                  store_.layout.padded_dim);
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t i = 0; i < num_items; ++i) {
    const int64_t after = i + omp_get_num_threads();  // what this thread is likely to do next
    attend(plan, plan.items()[i], after < num_items ? &plan.items()[after] : nullptr, layer, q, out,
           scratch);
  }
  if (num_rests) {
    barrier.wait();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < num_rests; ++i) {
      attend(plan, plan.rests()[i], nullptr, layer, q, out, scratch);
    }
  }
}

void Attention::write(const Plan& plan, int64_t layer, int64_t token, Tokens k, Tokens v) const {
  const Layout& layout = store_.layout;
  const int64_t block = plan.slots()[token] / layout.block_size;
  const int64_t slot = plan.slots()[token] % layout.block_size;
  for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
    store_.put(layout.key(layer, block, slot, head), k.row(token, head, size_of(store_.dtype)));
    store_.put(layout.value(layer, block, slot, head), v.row(token, head, size_of(store_.dtype)));
  }
}

// Positions of `span` up to last_position, at least one, of a packed store.
void Attention::find(const Plan& plan, int64_t row, int64_t layer, int64_t head, int64_t span,
                     int64_t last_position, SpanGroups& groups) const {
  const Layout& layout = store_.layout;
  const int32_t* table = plan.table(row);
  const int64_t start = span * kSpan;
  const int64_t end = std::min(last_position + 1, start + kSpan);
  groups.count = 0;
  for (int64_t position = start; position < end; position += kGroup, ++groups.count) {
    const int64_t group = layout.offset(layer, table[position / layout.block_size], head) +
                          position % layout.block_size / kGroup * layout.group_stride();
    groups.keys[groups.count] = store_.at(group);
    groups.values[groups.count] = store_.at(group + layout.value_stride());
  }
}

// The same of a store that is not packed: packs them into the scratch. What is not written there
// is never seen.
void Attention::pack(const Plan& plan, int64_t row, int64_t layer, int64_t head, int64_t span,
                     int64_t last_position, Scratch& scratch, SpanGroups& groups) const {
  const Layout& from = store_.layout;
  const Store packed{scratch.packed, store_.dtype, packed_span(from), store_.head_dim};
  const Layout& to = packed.layout;
  const int64_t start = span * kSpan;
  const int64_t count = std::min<int64_t>(last_position + 1 - start, kSpan);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t block = plan.table(row)[(start + j) / from.block_size];
    const int64_t slot = (start + j) % from.block_size;
    packed.put(to.key(0, 0, j, 0), store_.at(from.key(layer, block, slot, head).offset));
    packed.put(to.value(0, 0, j, 0), store_.at(from.value(layer, block, slot, head).offset));
  }
  for (groups.count = 0; groups.count * kGroup < count; ++groups.count) {
    const int64_t group = groups.count * to.group_stride();
    groups.keys[groups.count] = packed.at(group);
    groups.values[groups.count] = packed.at(group + to.value_stride());
  }
}

void Attention::attend(const Plan& plan, const Item& item, const Item* after, int64_t layer,
                       Tokens q, Tokens out, Scratch& scratch) const {
  const int64_t group = num_heads_ / store_.layout.num_kv_heads;
  const int64_t padded_dim = store_.layout.padded_dim;
  const int64_t size = size_of(store_.dtype);
  const int dim = static_cast<int>(store_.head_dim);
  const int32_t* vectors = plan.vectors().data() + item.first;
  const int count = item.end - item.first;
  int64_t seen[kTile];
  for (int i = 0; i < count; ++i) {
    const int64_t token = vectors[i] / group;
    seen[i] = plan.seen(token);
    kernels_.load_query(q.row(token, item.head * group + vectors[i] % group, size), dim,
                        static_cast<int>(padded_dim),
                        reinterpret_cast<std::byte*>(scratch.queries + i * padded_dim));
  }
  scratch.clear(count, padded_dim);
  if (item.role == Item::kRest) take_up(plan, item, scratch);

  // The last vector sees the most, or all see the item's spans whole.
  const int64_t last_seen = seen[count - 1] - 1;
  const bool packed = store_.layout.packed();
  SpanGroups groups[2] = {};  // of the current span and of what is read next
  if (packed && item.first_span < item.end_span) {
    find(plan, item.row, layer, item.head, item.first_span, last_seen, groups[item.first_span % 2]);
  }
  int32_t limits[kTile];
  for (int64_t span = item.first_span; span < item.end_span; ++span) {
    int first = 0;
    for (int i = 0; i < count; ++i) {
      limits[i] = static_cast<int32_t>(std::clamp<int64_t>(seen[i] - span * kSpan, 0, kSpan));
      first += limits[i] == 0;
    }
    SpanGroups& now = groups[span % 2];
    SpanGroups& next = groups[(span + 1) % 2];
    next.count = 0;
    if (!packed) {
      pack(plan, item.row, layer, item.head, span, last_seen, scratch, now);
    } else if (span + 1 < item.end_span) {
      find(plan, item.row, layer, item.head, span + 1, last_seen, next);
    } else if (after && after->first_span < after->end_span) {
      const int64_t last = plan.seen(plan.vectors()[after->end - 1] / group) - 1;
      find(plan, after->row, layer, after->head, after->first_span, last, next);
    }
    kernels_.attend_span({&now, &next, reinterpret_cast<const std::byte*>(scratch.queries),
                          scale_ * kLog2E, limits, first, count, static_cast<int>(padded_dim),
                          scratch.scores, scratch.maximum, scratch.sum, scratch.accumulated});
    if (item.role == Item::kPart) put_down(plan, item, span, first, scratch);
  }
  if (item.role == Item::kPart) return;
  for (int i = 0; i < count; ++i) {
    kernels_.store_output(
        scratch.accumulated + i * padded_state(padded_dim), scratch.sum[i], dim,
        out.row(vectors[i] / group, item.head * group + vectors[i] % group, size));
  }
}

// Merges what parts put down, in the order of positions: the order of an item that is whole.
void Attention::take_up(const Plan& plan, const Item& item, Scratch& scratch) const {
  const int64_t padded_dim = store_.layout.padded_dim, values = padded_state(padded_dim);
  for (int i = 0; i < item.end - item.first; ++i) {
    const States& states = plan.states(plan.vectors()[item.first + i]);
    const float* state = scratch.states + states.index(item.head, 0) * state_floats(padded_dim);
    for (int j = 0; j < states.count; ++j, state += state_floats(padded_dim)) {
      kernels_.merge(static_cast<int>(values), state[values], state[values + 1], state,
                     scratch.maximum + i, scratch.sum + i, scratch.accumulated + i * values);
    }
  }
}

// A part that starts at the first position keeps one state to its end, as a whole item does; any
// other has one a span, since a merge of merged states would round in another order.
// Vectors before `first` saw nothing of the span.
void Attention::put_down(const Plan& plan, const Item& item, int64_t span, int first,
                         Scratch& scratch) const {
  const int64_t padded_dim = store_.layout.padded_dim, values = padded_state(padded_dim);
  const int count = item.end - item.first;
  if (item.first_span == 0) {
    if (span + 1 < item.end_span) return;
    first = 0;
  }
  for (int i = first; i < count; ++i) {
    const States& states = plan.states(plan.vectors()[item.first + i]);
    float* state = scratch.states + states.index(item.head, span) * state_floats(padded_dim);
    std::copy_n(scratch.accumulated + i * values, values, state);
    state[values] = scratch.maximum[i];
    state[values + 1] = scratch.sum[i];
  }
  scratch.clear(count, padded_dim);
}

}  // namespace pagedkv
