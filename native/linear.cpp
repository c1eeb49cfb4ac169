#include "linear.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "product.h"

namespace pagedkv {

PackedMatrix::PackedMatrix(int64_t rows, int64_t columns, DType dtype)
    : rows_(rows), columns_(columns), dtype_(dtype), memory_(allocate_zeroed(bytes())) {}

PackedMatrix::~PackedMatrix() { release(memory_, bytes()); }

std::byte* PackedMatrix::element(int64_t row, int64_t column) const {
  const int64_t a_step = columns_a_step();
  return panel(row / kPanel) + (column / a_step) * kStepBytes +
         (row % kPanel * a_step + column % a_step) * size_of(dtype_);
}

void PackedMatrix::write(int64_t first, int64_t count, Rows source) {
  const int64_t size = size_of(dtype_), a_step = columns_a_step();
  const int64_t end = first + count;
#pragma omp parallel for schedule(static)
  for (int64_t p = first / kPanel; p < ceil_div(end, kPanel); ++p) {
    const int64_t begin = std::max(first, p * kPanel), stop = std::min(end, (p + 1) * kPanel);
    for (int64_t column = 0; column < columns_; column += a_step) {
      const int64_t bytes = std::min(a_step, columns_ - column) * size;
      for (int64_t row = begin; row < stop; ++row) {
        std::memcpy(element(row, column),
                    source.data + ((row - first) * source.stride + column) * size, bytes);
      }
    }
  }
}

void PackedMatrix::gather(const int64_t* ids, int64_t count, Rows out) const {
  const int64_t size = size_of(dtype_), a_step = columns_a_step();
#pragma omp parallel for schedule(static) if (count * columns_ > kProductsAlone)
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* from = element(ids[i], 0);
    std::byte* to = out.data + i * out.stride * size;
    for (int64_t column = 0; column < columns_; column += a_step, from += kStepBytes) {
      std::memcpy(to + column * size, from, std::min(a_step, columns_ - column) * size);
    }
  }
}

void linear(const LinearKernels& kernels, const PackedMatrix& weight, const float* bias, Rows x,
            Rows out, int64_t num_rows) {
  const int64_t size = size_of(weight.dtype());
  const bool alone = num_rows * weight.rows() * weight.columns() < kProductsAlone;
  const PackedMatrix* const weights[] = {&weight};
  const auto store = [&](int64_t panel, int64_t first, int rows, float* const(&sums)[1]) {
    const int64_t n = panel * kPanel;
    const int wanted = static_cast<int>(wanted_of(weight, panel));
    for (int m = 0; m < rows; ++m) {
      kernels.store_row(sums[0] + m * kPanel, bias ? bias + n : nullptr, wanted,
                        out.data + ((first + m) * out.stride + n) * size);
    }
  };
#pragma omp parallel if (!alone)
  multiply(kernels, weights, x, num_rows, store);
}

}  // namespace pagedkv
