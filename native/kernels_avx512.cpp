// The kernels for x86-64 with AVX-512 F, BW and VL: the bits of avx2, in more registers.
#define PAGEDKV_ISA avx512
#include "kernels.inl"

namespace pagedkv {
const Kernels kAvx512Float32 = avx512::table<float>();
const Kernels kAvx512Bfloat16 = avx512::table<avx512::bfloat16>();
}  // namespace pagedkv
