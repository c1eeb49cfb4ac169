// What a decoder does with a row between its matrices, as a table of pointers: once for each
// instruction set and type. Like kernels.h, for files of any instruction set to include.
#pragma once

#include <cstdint>

namespace pagedkv {

// Rows are float32 on the way in; `out` is rounded once to the table's type.
struct RowKernels {
  void (*widen)(const void* x, int64_t count, float* out);  // exact
  void (*round)(const float* x, int64_t count, void* out);
  // out = x / sqrt(mean(x^2) + epsilon) * weight
  void (*rms_norm)(const float* x, const float* weight, int64_t count, float epsilon, void* out);
  // Turns the pairs (x[i], x[half + i]) by the angles with these cosines and sines.
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t half, void* out);
  // out = silu(gate) * up
  void (*silu_mul)(const float* gate, const float* up, int64_t count, void* out);
  // The largest of them as an integer: these compare as the values do, and any NaN is the largest.
  int32_t (*largest)(const float* x, int64_t count);
};

extern const RowKernels kScalarRowsFloat32;
extern const RowKernels kScalarRowsBfloat16;
#if defined(PAGEDKV_HAVE_AVX2)
extern const RowKernels kAvx2RowsFloat32;
extern const RowKernels kAvx2RowsBfloat16;
#endif
#if defined(PAGEDKV_HAVE_AVX512)
extern const RowKernels kAvx512RowsFloat32;
extern const RowKernels kAvx512RowsBfloat16;
#endif

}  // namespace pagedkv
