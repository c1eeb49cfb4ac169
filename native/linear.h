// y = x W^T + b with one order of accumulation for any number of rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace pagedkv {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row-major matrix with contiguous rows; `stride` in elements.
struct Rows {
  std::byte* data;
  int64_t stride;
};

// W [N, K] in panels of kPanel outputs, step by step over k, so that a product reads its memory
// once and in order: [ceil(N / kPanel), steps, kPanel] values of 4 bytes (one float32 or two
// bfloat16). What pads N and K is zero. Owns its memory.
class PackedMatrix {
 public:
  PackedMatrix(int64_t rows, int64_t columns, DType dtype);
  ~PackedMatrix();
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  DType dtype() const { return dtype_; }
  int64_t panels() const { return ceil_div(rows_, kPanel); }
  int64_t steps() const { return ceil_div(columns_, columns_a_step()); }
  int64_t columns_a_step() const { return kStepBytes / kPanel / size_of(dtype_); }
  int64_t panel_bytes() const { return steps() * kStepBytes; }
  std::size_t bytes() const { return static_cast<std::size_t>(panels() * panel_bytes()); }
  std::byte* panel(int64_t index) const { return memory_ + index * panel_bytes(); }

  // Rows [first, first + count) from a row-major source.
  void write(int64_t first, int64_t count, Rows source);
  // out[i] = row ids[i], exact.
  void gather(const int64_t* ids, int64_t count, Rows out) const;

 private:
  std::byte* element(int64_t row, int64_t column) const;

  int64_t rows_, columns_;
  DType dtype_;
  std::byte* memory_;
};

// out[t] = x[t] W^T + bias for t < num_rows; bias is [round_up(N, kPanel)] or nullptr. The bits
// of out[t, n] depend on x[t], W[n] and bias[n] only.
void linear(const LinearKernels& kernels, const PackedMatrix& weight, const float* bias, Rows x,
            Rows out, int64_t num_rows);

}  // namespace pagedkv
