// The bfloat16 kernels for x86-64 with AVX-512 and its bfloat16 dot product.
#define PAGEDKV_ISA avx512bf16
#include "kernels.inl"
#include "linear.inl"

namespace pagedkv {
const Kernels kAvx512Bf16Bfloat16 = avx512bf16::table<avx512bf16::PairStep>();
const LinearKernels kAvx512Bf16LinearBfloat16 = avx512bf16::linear_table<avx512bf16::PairStep>();
}  // namespace pagedkv
