#include "activation.h"

namespace pagedkv {

void silu_mul(const Kernels& kernels, DType dtype, Rows gate_up, Rows out, int64_t num_rows,
              int64_t width) {
  constexpr int64_t kChunk = 1024;
  const int64_t chunks = (width + kChunk - 1) / kChunk;
  const int64_t size = size_of(dtype);
#pragma omp parallel for collapse(2) schedule(static) if (num_rows * width > 16 * kChunk)
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t begin = chunk * kChunk;
      const int64_t count = begin + kChunk < width ? kChunk : width - begin;
      const std::byte* gate = gate_up.data + (row * gate_up.stride + begin) * size;
      kernels.silu_mul(gate, gate + width * size, count,
                       out.data + (row * out.stride + begin) * size);
    }
  }
}

}  // namespace pagedkv
