// The kernels for any machine: whatever vectors the compiler's baseline has.
#define PAGEDKV_ISA scalar
#include "kernels.inl"
#include "linear.inl"

namespace pagedkv {
const Kernels kScalarFloat32 = scalar::table<scalar::Float32Step>();
const Kernels kScalarBfloat16 = scalar::table<scalar::WidenedStep>();
const LinearKernels kScalarLinearFloat32 = scalar::linear_table<scalar::Float32Step>();
const LinearKernels kScalarLinearBfloat16 = scalar::linear_table<scalar::WidenedStep>();
}  // namespace pagedkv
