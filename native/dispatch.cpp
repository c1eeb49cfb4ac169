#include "dispatch.h"

#include <stdexcept>

namespace pagedkv {
namespace {

// To add an instruction set: a kernels_*.cpp, its flags in CMakeLists.txt, and a row here.
template <typename Table>
struct Isa {
  const char* name;
  bool (*runs_here)();
  const Table* float32;
  const Table* bfloat16;
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

const Isa<Kernels> kIsas[] = {
    {"scalar", anywhere, &kScalarFloat32, &kScalarBfloat16},
#if defined(PAGEDKV_HAVE_AVX2)
    {"avx2", has_avx2, &kAvx2Float32, &kAvx2Bfloat16},
#endif
#if defined(PAGEDKV_HAVE_AVX512)
    {"avx512", has_avx512, &kAvx512Float32, &kAvx512Bfloat16},
#endif
};

const Isa<LinearKernels> kLinearIsas[] = {
    {"scalar", anywhere, &kScalarLinearFloat32, &kScalarLinearBfloat16},
#if defined(PAGEDKV_HAVE_AVX2)
    {"avx2", has_avx2, &kAvx2LinearFloat32, &kAvx2LinearBfloat16},
#endif
#if defined(PAGEDKV_HAVE_AVX512)
    {"avx512", has_avx512, &kAvx512LinearFloat32, &kAvx512LinearBfloat16},
    {"avx512bf16", has_avx512bf16, &kAvx512LinearFloat32, &kAvx512Bf16LinearBfloat16},
#endif
};

template <typename Table, std::size_t N>
std::vector<std::string> names_of(const Isa<Table> (&isas)[N]) {
  std::vector<std::string> names;
  for (const Isa<Table>& isa : isas) {
    if (isa.runs_here()) names.push_back(isa.name);
  }
  return names;
}

template <typename Table, std::size_t N>
const Table& table_for(const Isa<Table> (&isas)[N], const std::string& name, DType dtype) {
  for (const Isa<Table>& isa : isas) {
    if (isa.name == name && isa.runs_here()) {
      return dtype == DType::kFloat32 ? *isa.float32 : *isa.bfloat16;
    }
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

std::vector<std::string> available_isas() { return names_of(kIsas); }

std::vector<std::string> available_linear_isas() { return names_of(kLinearIsas); }

const Kernels& kernels_for(const std::string& isa, DType dtype) {
  return table_for(kIsas, isa, dtype);
}

const LinearKernels& linear_kernels_for(const std::string& isa, DType dtype) {
  return table_for(kLinearIsas, isa, dtype);
}

}  // namespace pagedkv
