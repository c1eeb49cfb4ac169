// The kernels for x86-64 with AVX2 and FMA.
#define PAGEDKV_ISA avx2
#include "kernels.inl"
#include "linear.inl"
#include "rows.inl"

namespace pagedkv {
const Kernels kAvx2Float32 = avx2::table<avx2::Float32Step>();
const Kernels kAvx2Bfloat16 = avx2::table<avx2::WidenedStep>();
const LinearKernels kAvx2LinearFloat32 = avx2::linear_table<avx2::Float32Step>();
const LinearKernels kAvx2LinearBfloat16 = avx2::linear_table<avx2::WidenedStep>();
const RowKernels kAvx2RowsFloat32 = avx2::row_table<float>();
const RowKernels kAvx2RowsBfloat16 = avx2::row_table<avx2::bfloat16>();
}  // namespace pagedkv
