// The kernels for x86-64 with AVX2 and FMA.
#define PAGEDKV_ISA avx2
#include "kernels.inl"

namespace pagedkv {
const Kernels kAvx2Float32 = avx2::table<float>();
const Kernels kAvx2Bfloat16 = avx2::table<avx2::bfloat16>();
}  // namespace pagedkv
