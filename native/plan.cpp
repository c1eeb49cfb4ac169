#include <algorithm>

#include "attention.h"

namespace pagedkv {
namespace {

// Below this many (query vector, key) pairs a step is not worth waking another thread for.
constexpr int64_t kPairsPerThread = 4096;
// Items a thread should have to choose from, so that threads end together.
constexpr int64_t kItemsPerThread = 4;

int64_t cost(const Item& item) {
  return static_cast<int64_t>(item.end_vector - item.first_vector) *
         (item.end_span - item.first_span);
}

}  // namespace

Plan::Plan(const Shape& shape, std::vector<int32_t> query_lens, std::vector<int32_t> context_lens,
           std::vector<int32_t> tables, int64_t width, std::vector<int64_t> slots,
           int num_threads)
    : query_lens_(std::move(query_lens)),
      context_lens_(std::move(context_lens)),
      tables_(std::move(tables)),
      width_(width),
      slots_(std::move(slots)) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  int64_t pairs = 0, tiles = 0, spans = 0, token = 0;
  for (size_t row = 0; row < query_lens_.size(); ++row) {
    first_tokens_.push_back(token);
    token += query_lens_[row];
    pairs += query_lens_[row] * shape.num_heads * static_cast<int64_t>(context_lens_[row]);
    const int64_t row_tiles =
        shape.num_kv_heads * (round_up(query_lens_[row] * group, kTile) / kTile);
    tiles += row_tiles;
    spans += row_tiles * (round_up(context_lens_[row], kSpan) / kSpan);
  }
  num_threads_ = static_cast<int>(
      std::clamp<int64_t>(pairs / kPairsPerThread, 1, std::max(num_threads, 1)));

  // With too few tiles for the threads, contexts are split over their spans. The merge in order
  // of spans is what an unsplit item does too, so the bits are the same.
  const int64_t wanted = kItemsPerThread * num_threads_;
  const bool split = num_threads_ > 1 && tiles < wanted;
  const int32_t chunk =
      split ? static_cast<int32_t>(std::max<int64_t>(spans / wanted, 1)) : INT32_MAX;
  for (size_t row = 0; row < query_lens_.size(); ++row) {
    const int64_t vectors = query_lens_[row] * group;
    for (int64_t first = 0; first < vectors; first += kTile) {
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        add_tile(shape, static_cast<int32_t>(row), static_cast<int32_t>(head),
                 static_cast<int32_t>(first),
                 static_cast<int32_t>(std::min<int64_t>(first + kTile, vectors)), chunk);
      }
    }
  }
  // Dearest first: the last items to be handed out are the small ones.
  std::stable_sort(items_.begin(), items_.end(),
                   [](const Item& a, const Item& b) { return cost(a) > cost(b); });
}

void Plan::add_tile(const Shape& shape, int32_t row, int32_t head, int32_t first, int32_t end,
                    int32_t chunk) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t last_position = context_lens_[row] - query_lens_[row] + (end - 1) / group;
  const int32_t spans = static_cast<int32_t>(last_position / kSpan + 1);
  if (spans <= chunk) {
    items_.push_back({row, head, first, end, 0, spans, -1});
    return;
  }
  merges_.push_back({row, head, first, end, spans, num_partials_});
  for (int32_t span = 0; span < spans; span += chunk) {
    const int32_t end_span = std::min(span + chunk, spans);
    items_.push_back({row, head, first, end, span, end_span,
                      num_partials_ + static_cast<int64_t>(span) * (end - first)});
  }
  num_partials_ += static_cast<int64_t>(spans) * (end - first);
}

}  // namespace pagedkv
