#include "linear.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "memory.h"

namespace pagedkv {
namespace {

// Panels that one thread works on at a time stay in its second-level cache while the tiles of
// rows pass by.
constexpr int64_t kGroupBytes = 384 << 10;
constexpr int64_t kMaxGroup = 8;
// Tiles of an item of work, when there are many: enough to use the group's stay in the cache.
constexpr int64_t kItemTiles = 8;
// Items a thread should have to choose from, so that threads end together.
constexpr int64_t kItemsPerThread = 4;
// Below this many multiply-adds it is not worth to wake another thread.
constexpr int64_t kProductsAlone = 1 << 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

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
  const int64_t size = size_of(weight.dtype()), a_step = weight.columns_a_step();
  const int64_t panels = weight.panels(), steps = weight.steps();
  const int64_t tiles = ceil_div(num_rows, kernels.max_rows);
  // Few rows: panel after panel, one stream through memory. Many rows: groups of panels share the
  // loading of tiles.
  const int64_t fitting = std::min(kGroupBytes / weight.panel_bytes(),
                                   panels / (kItemsPerThread * omp_get_max_threads()));
  const int64_t group = tiles <= 1 ? 1 : std::clamp<int64_t>(fitting, 1, kMaxGroup);
  const int64_t groups = ceil_div(panels, group), blocks = ceil_div(tiles, kItemTiles);
  const bool alone = num_rows * weight.rows() * weight.columns() < kProductsAlone;

#pragma omp parallel if (!alone)
  {
    alignas(64) std::byte tile[kTileBytes];
    alignas(64) float sums[kMaxGroup * kTileRows * kPanel];
#pragma omp for collapse(2) schedule(guided) nowait
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first_panel = g * group;
        const int64_t count = std::min(group, panels - first_panel);
        for (int64_t t = tiles * block / blocks; t < tiles * (block + 1) / blocks; ++t) {
          const int64_t first = num_rows * t / tiles;
          const int rows = static_cast<int>(num_rows * (t + 1) / tiles - first);
          const int64_t panel_sums = rows * kPanel;
          std::memset(sums, 0, sizeof(float) * count * panel_sums);
          for (int64_t step = 0; step < steps; step += kTileSteps) {
            const int64_t column = step * a_step;
            kernels.load_tile(
                x.data + (first * x.stride + column) * size, x.stride * size, rows,
                static_cast<int>(std::min(kTileSteps * a_step, weight.columns() - column)), tile);
            for (int64_t p = 0; p < count; ++p) {
              kernels.multiply(weight.panel(first_panel + p) + step * kStepBytes, tile, rows,
                               static_cast<int>(std::min<int64_t>(kTileSteps, steps - step)),
                               sums + p * panel_sums);
            }
          }
          for (int64_t p = 0; p < count; ++p) {
            const int64_t n = (first_panel + p) * kPanel;
            const int wanted = static_cast<int>(std::min<int64_t>(kPanel, weight.rows() - n));
            for (int m = 0; m < rows; ++m) {
              kernels.store_row(sums + p * panel_sums + m * kPanel, bias ? bias + n : nullptr,
                                wanted, out.data + ((first + m) * out.stride + n) * size);
            }
          }
        }
      }
    }
  }
}

}  // namespace pagedkv
