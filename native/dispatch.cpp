#include "dispatch.h"

#include <stdexcept>

namespace pagedkv {
namespace {

// To add an instruction set: a kernels_*.cpp, its flags in CMakeLists.txt, and a row here.
struct Isa {
  const char* name;
  bool (*runs_here)();
  const Kernels* float32;
  const Kernels* bfloat16;
  const LinearKernels* linear_float32;
  const LinearKernels* linear_bfloat16;
  const RowKernels* rows_float32;
  const RowKernels* rows_bfloat16;
};

bool anywhere() { return true; }

#if defined(PAGEDKV_HAVE_AVX2)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

#if defined(PAGEDKV_HAVE_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

const Isa kIsas[] = {
    {"scalar", anywhere, &kScalarFloat32, &kScalarBfloat16, &kScalarLinearFloat32,
     &kScalarLinearBfloat16, &kScalarRowsFloat32, &kScalarRowsBfloat16},
#if defined(PAGEDKV_HAVE_AVX2)
    {"avx2", has_avx2, &kAvx2Float32, &kAvx2Bfloat16, &kAvx2LinearFloat32, &kAvx2LinearBfloat16,
     &kAvx2RowsFloat32, &kAvx2RowsBfloat16},
#endif
#if defined(PAGEDKV_HAVE_AVX512)
    {"avx512", has_avx512, &kAvx512Float32, &kAvx512Bfloat16, &kAvx512LinearFloat32,
     &kAvx512LinearBfloat16, &kAvx512RowsFloat32, &kAvx512RowsBfloat16},
    {"avx512bf16", has_avx512bf16, &kAvx512Float32, &kAvx512Bf16Bfloat16, &kAvx512LinearFloat32,
     &kAvx512Bf16LinearBfloat16, &kAvx512RowsFloat32, &kAvx512RowsBfloat16},
#endif
};

const Isa& isa_named(const std::string& name) {
  for (const Isa& isa : kIsas) {
    if (isa.name == name && isa.runs_here()) return isa;
  }
  throw std::invalid_argument("isa '" + name + "' is not available in this build on this machine");
}

}  // namespace

std::map<std::string, bool> cpu_features() {
#if defined(__x86_64__)
  return {
      {"avx2", __builtin_cpu_supports("avx2") != 0},
      {"fma", __builtin_cpu_supports("fma") != 0},
      {"avx512f", __builtin_cpu_supports("avx512f") != 0},
      {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
      {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
      {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0},
  };
#else
  return {};
#endif
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.runs_here()) names.push_back(isa.name);
  }
  return names;
}

const Kernels& kernels_for(const std::string& name, DType dtype) {
  const Isa& isa = isa_named(name);
  return dtype == DType::kFloat32 ? *isa.float32 : *isa.bfloat16;
}

const LinearKernels& linear_kernels_for(const std::string& name, DType dtype) {
  const Isa& isa = isa_named(name);
  return dtype == DType::kFloat32 ? *isa.linear_float32 : *isa.linear_bfloat16;
}

const RowKernels& row_kernels_for(const std::string& name, DType dtype) {
  const Isa& isa = isa_named(name);
  return dtype == DType::kFloat32 ? *isa.rows_float32 : *isa.rows_bfloat16;
}

}  // namespace pagedkv
