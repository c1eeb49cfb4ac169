// Element-wise functions whose result for an element does not depend on where it stands.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace pagedkv {

// A row-major matrix with contiguous rows; `stride` in elements.
struct Rows {
  std::byte* data;
  int64_t stride;
};

// out[t, i] = silu(gate_up[t, i]) * gate_up[t, width + i] for t < num_rows, i < width.
void silu_mul(const Kernels& kernels, DType dtype, Rows gate_up, Rows out, int64_t num_rows,
              int64_t width);

}  // namespace pagedkv
