// The functions that exist once for each instruction set and K/V type, as a table of pointers.
// Files compiled for an instruction set include this and nothing that the others also compile
// (no <vector>, <algorithm>): the linker would keep one copy of a shared inline function, and that
// copy could hold instructions which the machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace pagedkv {

// Softmax is accumulated span by span: kSpan absolute positions, starting at multiples of kSpan,
// each on its own, merged in order. Part of the numerical contract: it fixes the result's bits.
constexpr int kSpan = 128;
constexpr int kSpanGroups = kSpan / kGroup;
// Query vectors (a position and a head) that one call works on.
constexpr int kTile = 48;
// Rows (query vectors, or rows of a linear layer) that share the loads of what is packed, at most.
constexpr int kTileRows = 12;
// Scores of a vector, padded so that vectors do not meet in the same lines of the cache.
constexpr int kScoreStride = kSpan + 16;

// A state's weighted values: head_dim padded to whole registers of any instruction set.
constexpr int64_t padded_state(int64_t head_dim) { return round_up(head_dim, kGroup); }

// Where the packed groups of one span's positions lie (layout.h).
struct SpanGroups {
  const std::byte* keys[kSpanGroups];
  const std::byte* values[kSpanGroups];
  int count = 0;  // that are valid
};

// One span of positions for a tile of query vectors of one K/V head.
// Vector i sees the span's first limits[i] positions; limits ascend, and are >= 1 from `first` on.
struct SpanTask {
  const SpanGroups* span;  // at least those that the last vector sees
  const SpanGroups* next;  // whose keys will be read next, to be fetched meanwhile
  const std::byte* queries;  // [count, padded_dim * 4 bytes], as load_query leaves them
  float scale;               // of the scores, times log2(e); more than 0
  const int32_t* limits;     // [count]
  int first;
  int count;
  int padded_dim;
  float* scores;  // scratch [kTileRows, kScoreStride], aligned to 64 bytes
  // State of each vector, merged into: maximum (of base-2 exponents), sum of weights, weighted
  // values.
  float* maximum;      // [count]
  float* sum;          // [count]
  float* accumulated;  // [count, padded_state]
};

struct Kernels {
  // Leaves a query as attend_span wants it, in 4 bytes an element; what pads it is zero.
  void (*load_query)(const std::byte* query, int dim, int padded_dim, std::byte* out);
  void (*attend_span)(const SpanTask& task);
  // Merges the state of a later span into the state of the earlier ones.
  void (*merge)(int padded_state, float from_maximum, float from_sum, const float* from,
                float* maximum, float* sum, float* accumulated);
  void (*store_output)(const float* accumulated, float sum, int dim, std::byte* out);
};

// Outputs of a panel of a packed matrix (linear.h).
constexpr int kPanel = 32;
// Bytes of a panel for one step over k: one k in float32, two in bfloat16.
constexpr int kStepBytes = 4 * kPanel;
// Steps that one call of `multiply` takes at most: what a tile has room for.
constexpr int kTileSteps = 384;
// Bytes of a tile's row, padded so that rows do not meet in the same lines of the cache.
constexpr int kTileStride = (kTileSteps + 16) * 8;
constexpr int kTileBytes = kTileRows * kTileStride;

// Memory to be fetched while a product is computed: `stride` bytes a step.
struct Fetch {
  const std::byte* from;
  int64_t stride;
  bool again;  // it will be read more than once: it may stay in the caches
};

// Rows times a panel. Every sum is accumulated in one chain over ascending k, in its own lane,
// whatever the number of rows: that is what makes a row's bits its own.
struct LinearKernels {
  int max_rows;  // at most kTileRows
  bool in_place;  // a tile is rows as they lie, when whole steps fill them
  // Copies k's [0, count) of each row, `stride` bytes apart, to the tile as `multiply` wants them.
  void (*load_tile)(const std::byte* x, int64_t stride, int rows, int count, std::byte* tile);
  // sums[m, n] += tile[m, ...] * panel[..., n]: sums is [rows, kPanel]. tile_stride: bytes.
  void (*multiply)(const std::byte* panel, const std::byte* tile, int64_t tile_stride, int rows,
                   int steps, float* sums, const Fetch& fetch);
  // out[n] = sums[n] + bias[n] (nullptr: none), rounded once, for n < count.
  void (*store_row)(const float* sums, const float* bias, int count, std::byte* out);
};

extern const Kernels kScalarFloat32;
extern const Kernels kScalarBfloat16;
extern const LinearKernels kScalarLinearFloat32;
extern const LinearKernels kScalarLinearBfloat16;
#if defined(PAGEDKV_HAVE_AVX2)
extern const Kernels kAvx2Float32;
extern const Kernels kAvx2Bfloat16;
extern const LinearKernels kAvx2LinearFloat32;
extern const LinearKernels kAvx2LinearBfloat16;
#endif
#if defined(PAGEDKV_HAVE_AVX512)
extern const Kernels kAvx512Float32;
extern const Kernels kAvx512Bfloat16;
extern const LinearKernels kAvx512LinearFloat32;
extern const LinearKernels kAvx512LinearBfloat16;
extern const Kernels kAvx512Bf16Bfloat16;
extern const LinearKernels kAvx512Bf16LinearBfloat16;
#endif

}  // namespace pagedkv
