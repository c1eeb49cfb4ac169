#include "sharing.h"

#include <algorithm>
#include <utility>

#include "kernels.h"

namespace pagedkv {
namespace {

struct Search {
  const int32_t* tables;
  int64_t width;
  int64_t block_size;
  const std::vector<int32_t>& full_spans;
  std::vector<SharedSpans> found;

  // The blocks in which a span lies, of one row.
  std::pair<const int32_t*, const int32_t*> blocks(int32_t row, int32_t span) const {
    const int64_t start = static_cast<int64_t>(span) * kSpan;
    const int32_t* table = tables + row * width;
    return {table + start / block_size, table + (start + kSpan - 1) / block_size + 1};
  }

  bool same(int32_t a, int32_t b, int32_t span) const {
    const auto [first, end] = blocks(a, span);
    return std::equal(first, end, blocks(b, span).first);
  }

  bool before(int32_t a, int32_t b, int32_t span) const {
    const auto [first, end] = blocks(a, span);
    const auto [other_first, other_end] = blocks(b, span);
    return std::lexicographical_compare(first, end, other_first, other_end);
  }

  // `rows` have all spans before `span` in common.
  void descend(std::vector<int32_t> rows, int32_t span) {
    const int32_t start = span;
    const auto goes_on = [&](int32_t row) {
      return full_spans[row] > span && same(rows.front(), row, span);
    };
    while (std::all_of(rows.begin(), rows.end(), goes_on)) ++span;
    if (span > start) found.push_back({rows, start, span});
    rows.erase(std::remove_if(rows.begin(), rows.end(),
                              [&](int32_t row) { return full_spans[row] <= span; }),
               rows.end());
    std::stable_sort(rows.begin(), rows.end(),
                     [&](int32_t a, int32_t b) { return before(a, b, span); });
    for (auto first = rows.begin(); first != rows.end();) {
      const auto end = std::find_if(
          first, rows.end(), [&](int32_t row) { return !same(*first, row, span); });
      if (end - first > 1) descend({first, end}, span);
      first = end;
    }
  }
};

}  // namespace

std::vector<SharedSpans> find_shared_spans(const int32_t* tables, int64_t width,
                                           int64_t block_size,
                                           const std::vector<int32_t>& full_spans) {
  Search search{tables, width, block_size, full_spans, {}};
  std::vector<int32_t> rows;
  for (size_t row = 0; row < full_spans.size(); ++row) {
    if (full_spans[row] > 0) rows.push_back(static_cast<int32_t>(row));
  }
  if (rows.size() > 1) search.descend(std::move(rows), 0);
  return std::move(search.found);
}

}  // namespace pagedkv
