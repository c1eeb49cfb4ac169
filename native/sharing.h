// Which rows of a step have leading spans in common, so that these are read once for all of them.
#pragma once

#include <cstdint>
#include <vector>

namespace pagedkv {

// Spans [first_span, end_span) lie in the same blocks for all of `rows` (two or more).
struct SharedSpans {
  std::vector<int32_t> rows;
  int32_t first_span;
  int32_t end_span;
};

// The sharing as a tree: a row that is in a later entry's spans is in an earlier entry for each of
// the spans before. full_spans[row] says how many leading spans were complete before the step;
// a row with 0 shares nothing. tables is [full_spans.size(), width].
std::vector<SharedSpans> find_shared_spans(const int32_t* tables, int64_t width,
                                           int64_t block_size,
                                           const std::vector<int32_t>& full_spans);

}  // namespace pagedkv
