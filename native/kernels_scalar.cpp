// The kernels for any machine: whatever vectors the compiler's baseline has.
#define PAGEDKV_ISA scalar
#include "kernels.inl"

namespace pagedkv {
const Kernels kScalarFloat32 = scalar::table<float>();
const Kernels kScalarBfloat16 = scalar::table<scalar::bfloat16>();
}  // namespace pagedkv
