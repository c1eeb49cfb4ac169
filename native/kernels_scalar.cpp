// The kernels for any machine: whatever vectors the compiler's baseline has.
#define PAGEDKV_ISA scalar
#include "kernels.inl"
#include "linear.inl"
#include "rows.inl"

namespace pagedkv {
const Kernels kScalarFloat32 = scalar::table<scalar::Float32Step>();
const Kernels kScalarBfloat16 = scalar::table<scalar::WidenedStep>();
const LinearKernels kScalarLinearFloat32 = scalar::linear_table<scalar::Float32Step>();
const LinearKernels kScalarLinearBfloat16 = scalar::linear_table<scalar::WidenedStep>();
const RowKernels kScalarRowsFloat32 = scalar::row_table<float>();
const RowKernels kScalarRowsBfloat16 = scalar::row_table<scalar::bfloat16>();
}  // namespace pagedkv
