// The kernels for x86-64 with AVX-512 F, BW and VL: the bits of avx2, in more and wider registers.
#define PAGEDKV_ISA avx512
#include "kernels.inl"
#include "linear.inl"
#include "rows.inl"

namespace pagedkv {
const Kernels kAvx512Float32 = avx512::table<avx512::Float32Step>();
const Kernels kAvx512Bfloat16 = avx512::table<avx512::WidenedStep>();
const LinearKernels kAvx512LinearFloat32 = avx512::linear_table<avx512::Float32Step>();
const LinearKernels kAvx512LinearBfloat16 = avx512::linear_table<avx512::WidenedStep>();
const RowKernels kAvx512RowsFloat32 = avx512::row_table<float>();
const RowKernels kAvx512RowsBfloat16 = avx512::row_table<avx512::bfloat16>();
}  // namespace pagedkv
