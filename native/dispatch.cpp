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
};

const Isa kIsas[] = {
    {"scalar", [] { return true; }, &kScalarFloat32, &kScalarBfloat16},
#if defined(PAGEDKV_HAVE_AVX2)
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); },
     &kAvx2Float32, &kAvx2Bfloat16},
#endif
};

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
  for (const Isa& isa : kIsas) {
    if (isa.name == name && isa.runs_here()) {
      return dtype == DType::kFloat32 ? *isa.float32 : *isa.bfloat16;
    }
  }
  throw std::invalid_argument("isa '" + name + "' is not available in this build on this machine");
}

}  // namespace pagedkv
