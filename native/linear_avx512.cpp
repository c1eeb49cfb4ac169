// The linear layers' kernels for x86-64 with AVX-512 F, BW and VL.
#define PAGEDKV_ISA avx512
#include "linear.inl"

namespace pagedkv {
const LinearKernels kAvx512LinearFloat32 = avx512::linear_table<avx512::Float32Step>();
const LinearKernels kAvx512LinearBfloat16 = avx512::linear_table<avx512::WidenedStep>();
}  // namespace pagedkv
