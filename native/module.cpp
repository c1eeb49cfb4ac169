// The Python module pagedkv._native. Every function that may take long releases the GIL.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include "memory.h"
#include "module.h"

namespace pagedkv {
namespace {

struct Extent {
  std::byte* memory;
  size_t bytes;
};

nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>> allocate(size_t bytes, bool touched) {
  auto* extent = new Extent{allocate_zeroed(bytes), bytes};
  if (touched) {
    nb::gil_scoped_release release_gil;
    touch(extent->memory, bytes);
  }
  nb::capsule owner(extent, [](void* p) noexcept {
    auto* held = static_cast<Extent*>(p);
    release(held->memory, held->bytes);
    delete held;
  });
  return {extent->memory, {bytes}, owner};
}

int count_threads() {
  int count = 0;
#pragma omp parallel reduction(+ : count)
  count += 1;
  return count;
}

}  // namespace
}  // namespace pagedkv

NB_MODULE(_native, m) {
  using namespace pagedkv;
  using namespace nb::literals;
  m.doc() = "The kernels for the CPU; see _native.pyi for the contract of each function.";

  bind_attention(m);
  bind_decoder(m);
  m.def("allocate", &allocate, "bytes"_a, "touched"_a = false);
  m.def("available_isas", &available_isas);
  m.def("cpu_features", &cpu_features);
  m.def("max_threads", &omp_get_max_threads);
  m.def("count_threads", &count_threads);
}
