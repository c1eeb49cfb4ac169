#include <algorithm>
#include <limits>
#include <numeric>

#include "attention.h"
#include "sharing.h"

namespace pagedkv {
namespace {

// Below this many (query vector, key) pairs a step is not worth waking another thread for.
constexpr int64_t kPairsPerThread = 4096;
// Items a thread should have to choose from, so that threads end together. Few, since each span of a
// split item costs a state that is put down and taken up, about a third of a vector's work on it.
constexpr int64_t kItemsPerThread = 3;

int32_t spans_of(int32_t positions) { return (positions + kSpan - 1) / kSpan; }

template <typename Work>
int64_t cost(const Work& work) {
  return static_cast<int64_t>(work.end - work.first) * (work.end_span - work.first_span);
}

// Dearest first: the last items to be handed out are the small ones.
void sort_by_cost(std::vector<Item>& items) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return cost(a) > cost(b); });
}

}  // namespace

Plan::Plan(const Shape& shape, std::vector<int32_t> query_lens, std::vector<int32_t> context_lens,
           std::vector<int32_t> tables, int64_t width, std::vector<int64_t> slots,
           int num_threads, bool share)
    : group_(static_cast<int32_t>(shape.num_heads / shape.num_kv_heads)),
      query_lens_(std::move(query_lens)),
      context_lens_(std::move(context_lens)),
      tables_(std::move(tables)),
      width_(width),
      slots_(std::move(slots)),
      max_threads_(std::max(num_threads, 1)) {
  int64_t pairs = 0;
  for (size_t row = 0; row < query_lens_.size(); ++row) {
    const int32_t history = context_lens_[row] - query_lens_[row];
    for (int32_t i = 1; i <= query_lens_[row]; ++i) seen_.push_back(history + i);
    pairs += query_lens_[row] * shape.num_heads * static_cast<int64_t>(context_lens_[row]);
  }
  vectors_.resize(seen_.size() * group_);
  std::iota(vectors_.begin(), vectors_.end(), 0);
  states_.resize(vectors_.size());
  num_threads_ = static_cast<int>(
      std::clamp<int64_t>(pairs / kPairsPerThread, 1, max_threads_));

  const std::vector<Tile> all = tiles(shape, share);
  const int32_t heads = static_cast<int32_t>(shape.num_kv_heads);
  int64_t dearest = std::numeric_limits<int64_t>::max();
  if (num_threads_ > 1) {
    int64_t total = 0;
    for (const Tile& tile : all) total += cost(tile) * heads;
    dearest = total / (kItemsPerThread * num_threads_);
  }
  for (const Tile& tile : all) add_tile(tile, heads, dearest);
  sort_by_cost(items_);
  sort_by_cost(rests_);
}

// Common tiles in the order of their spans, then each row's own.
std::vector<Plan::Tile> Plan::tiles(const Shape& shape, bool share) {
  const int32_t rows = static_cast<int32_t>(query_lens_.size());
  std::vector<int32_t> first_vectors(rows), full_spans(rows), own_from(rows);
  for (int32_t row = 0, token = 0; row < rows; token += query_lens_[row++]) {
    first_vectors[row] = token * group_;
    // A row that fills tiles on its own gains nothing.
    if (share && query_lens_[row] * group_ < kTile) full_spans[row] = (seen_[token] - 1) / kSpan;
  }
  // Where tiles are few, narrower ones occupy the threads; that is cheaper than splitting them.
  const int64_t vectors = static_cast<int64_t>(vectors_.size()) * shape.num_kv_heads;
  const bool few = num_threads_ > 1 && vectors < kItemsPerThread * num_threads_ * kTile;
  const int32_t widest = few ? kTile / 2 : kTile;
  std::vector<Tile> all;
  for (const SharedSpans& shared :
       find_shared_spans(tables_.data(), width_, shape.block_size, full_spans)) {
    const int32_t first = static_cast<int32_t>(vectors_.size());
    for (const int32_t row : shared.rows) {
      own_from[row] = shared.end_span;
      for (int32_t i = 0; i < query_lens_[row] * group_; ++i) {
        vectors_.push_back(first_vectors[row] + i);
      }
    }
    const int32_t end = static_cast<int32_t>(vectors_.size());
    for (int32_t i = first; i < end; i += widest) {
      all.push_back({shared.rows.front(), i, std::min(i + widest, end), shared.first_span,
                     shared.end_span, true});
    }
    num_shared_spans_ += shared.end_span - shared.first_span;
  }
  for (int32_t row = 0; row < rows; ++row) {
    const int32_t end = first_vectors[row] + query_lens_[row] * group_;
    for (int32_t i = first_vectors[row]; i < end; i += widest) {
      const int32_t tile_end = std::min(i + widest, end);
      all.push_back({row, i, tile_end, own_from[row], spans_of(seen_[(tile_end - 1) / group_]),
                     false});
    }
  }
  return all;
}

// Tiles dearer than `dearest` are split over their spans, so that all threads have work. States
// merge in the order of spans, which is what an unsplit item does too, so the bits are the same.
void Plan::add_tile(const Tile& tile, int32_t num_kv_heads, int64_t dearest) {
  const int32_t spans = tile.end_span - tile.first_span;
  const bool split = spans > 1 && cost(tile) > dearest;
  if (tile.common || split) {
    const int64_t longest = std::max<int64_t>(dearest / (tile.end - tile.first), 1);
    const int32_t pieces = static_cast<int32_t>((spans + longest - 1) / longest);
    add_parts(tile, num_kv_heads, (spans + pieces - 1) / pieces);
  }
  if (tile.common) return;
  const bool has_states = split || tile.first_span > 0;
  for (int32_t head = 0; head < num_kv_heads; ++head) {
    std::vector<Item>& items = has_states ? rests_ : items_;
    items.push_back({has_states ? Item::kRest : Item::kWhole, tile.row, head, tile.first, tile.end,
                     split ? tile.end_span : tile.first_span, tile.end_span});
  }
  if (!has_states) return;
  for (int32_t i = tile.first; i < tile.end; ++i) {  // no part will be added to them
    States& states = states_[vectors_[i]];
    states.first = num_states_;
    num_states_ += static_cast<int64_t>(states.count) * num_kv_heads;
  }
}

void Plan::add_parts(const Tile& tile, int32_t num_kv_heads, int32_t chunk) {
  for (int32_t i = tile.first; i < tile.end; ++i) {
    States& states = states_[vectors_[i]];
    if (tile.first_span == 0) states.whole_spans = chunk;
    const int32_t end = std::min(tile.end_span, spans_of(seen_[vectors_[i] / group_]));
    states.count = std::max(end - states.whole_spans, 0) + 1;
  }
  for (int32_t span = tile.first_span; span < tile.end_span; span += chunk) {
    const int32_t end_span = std::min(span + chunk, tile.end_span);
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      items_.push_back({Item::kPart, tile.row, head, tile.first, tile.end, span, end_span});
    }
  }
}

}  // namespace pagedkv
