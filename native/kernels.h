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
// Query vectors (a position and a head) that one call works on.
constexpr int kTile = 48;
// Row pointers of a span are padded to a multiple of this with a valid pointer.
constexpr int kKeyGroup = 8;
// Query vectors whose scores are kept at a time, at most.
constexpr int kScoreRows = 6;

// One span of positions for a tile of query vectors of one K/V head.
// Vector i sees the span's first limits[i] keys; limits ascend, and are >= 1 from `first` on.
struct SpanTask {
  const void* const* keys;  // [round_up(limits[count - 1], kKeyGroup)] rows of padded_dim
  const void* const* values;
  const void* const* next_keys;  // rows that the next span will read, to be fetched meanwhile
  int num_next;
  const float* queries;  // [count, padded_dim], scaled
  const int32_t* limits;  // [count]
  int first;
  int count;
  int padded_dim;
  float* scores;      // scratch [kScoreRows, kSpan]
  float* converted;   // scratch [2, kSpan, padded_dim], aligned to 64 bytes
  // State of each vector, merged into: maximum, sum of weights, weighted values.
  float* maximum;      // [count]
  float* sum;          // [count]
  float* accumulated;  // [count, padded_dim]
};

struct Kernels {
  void (*load_query)(const void* query, float scale, int dim, int padded_dim, float* out);
  void (*attend_span)(const SpanTask& task);
  // Merges the state of a later span into the state of the earlier ones.
  void (*merge)(int padded_dim, float from_maximum, float from_sum, const float* from,
                float* maximum, float* sum, float* accumulated);
  void (*store_output)(const float* accumulated, float sum, int dim, void* out);
  void (*silu_mul)(const void* gate, const void* up, int64_t count, void* out);
};

// Outputs of a panel of a packed matrix (linear.h).
constexpr int kPanel = 32;
// Bytes of a panel for one step over k: one k in float32, two in bfloat16.
constexpr int kStepBytes = 4 * kPanel;
// Steps that one call of `multiply` takes at most, and rows of a tile: what a tile has room for.
constexpr int kTileSteps = 256;
constexpr int kTileRows = 12;
// Values of a tile's row, padded so that rows do not meet in the same lines of the cache.
constexpr int kTileStride = kTileSteps + 16;
constexpr int kTileBytes = kTileRows * kTileStride * 8;

// Rows times a panel. Every sum is accumulated in one chain over ascending k, in its own lane,
// whatever the number of rows: that is what makes a row's bits its own.
struct LinearKernels {
  int max_rows;  // at most kTileRows
  // Copies k's [0, count) of each row, `stride` bytes apart, to the tile as `multiply` wants them.
  void (*load_tile)(const std::byte* x, int64_t stride, int rows, int count, std::byte* tile);
  // sums[m, n] += tile[m, ...] * panel[..., n]: sums is [rows, kPanel].
  void (*multiply)(const std::byte* panel, const std::byte* tile, int rows, int steps, float* sums);
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
extern const LinearKernels kAvx512Bf16LinearBfloat16;
#endif

}  // namespace pagedkv
