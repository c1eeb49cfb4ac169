// Rows times packed matrices by the threads of a parallel region.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "linear.h"

namespace pagedkv {

// Panels that one thread works on at a time stay in its second-level cache while the tiles of
// rows pass by.
constexpr int64_t kGroupBytes = 384 << 10;
constexpr int64_t kMaxGroup = 8;
// Tiles of an item of work, when there are many: enough to use the group's stay in the cache.
constexpr int64_t kItemTiles = 8;
// So few tiles pass over one panel after the other, each while a part of the next panel is fetched:
// memory is read all the time, not only by the first tile.
constexpr int64_t kFewTiles = 3;
// Bytes that a panel is fetched ahead otherwise: the stream runs from panel to panel, across the
// pages at which the hardware's own fetching stops. Weights that one tile reads are used once a step:
// fetched as such, they leave the caches to the rest.
constexpr int64_t kFetchAhead = 4096;
// Items a thread should have to choose from, so that threads end together.
constexpr int64_t kItemsPerThread = 4;
// Below this many multiply-adds in all it is not worth waking another thread.
constexpr int64_t kProductsAlone = 1 << 16;

// Whether rows so far apart, in bytes, are better copied than read where they lie: most of them
// would meet in the same lines of the first-level cache.
inline bool collides(int64_t stride) {
  constexpr int64_t kWay = 4096, kApart = 4;
  return kWay / std::gcd(stride, kWay) < kApart;
}

// Outputs of a panel that are not padding.
inline int64_t wanted_of(const PackedMatrix& weight, int64_t panel) {
  return std::min<int64_t>(kPanel, weight.rows() - panel * kPanel);
}

// Calls finish(panel, first, rows, sums) for every panel of outputs and every tile of rows, with
// sums[p][m * kPanel + n] = x[first + m] W_p[panel * kPanel + n]^T: of `Parts` matrices of one shape
// at once, so that what needs two products of an output has them. Every thread of the innermost
// parallel region calls this; it does not wait for the others at its end. `finish` runs on the
// thread that has the sums, and no two calls have an output in common.
template <int Parts, typename Finish>
void multiply(const LinearKernels& kernels, const PackedMatrix* const (&weights)[Parts], Rows x,
              int64_t num_rows, const Finish& finish) {
  const PackedMatrix& shape = *weights[0];
  const int64_t size = size_of(shape.dtype()), a_step = shape.columns_a_step();
  const int64_t panels = shape.panels(), steps = shape.steps();
  const int64_t chunk = ceil_div(steps, ceil_div(steps, kTileSteps));  // no short rest
  const int64_t tiles = ceil_div(num_rows, kernels.max_rows);
  // Few rows: panel after panel, one stream through memory. Many rows: groups of panels share the
  // loading of tiles.
  const bool few = tiles > 1 && tiles <= kFewTiles;
  const int64_t fitting = std::min(kGroupBytes / (Parts * shape.panel_bytes()),
                                   panels / (kItemsPerThread * omp_get_num_threads()));
  const int64_t group = tiles <= kFewTiles ? 1 : std::clamp<int64_t>(fitting, 1, kMaxGroup / Parts);
  const int64_t row_bytes = x.stride * size;
  const bool copy = !kernels.in_place || shape.columns() % a_step || collides(row_bytes);
  const int64_t share = ceil_div(kStepBytes, tiles ? tiles : 1);  // of a step's bytes, for a tile
  const int64_t groups = ceil_div(panels, group), blocks = ceil_div(tiles, kItemTiles);

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
        std::memset(sums, 0, sizeof(float) * Parts * count * panel_sums);
        for (int64_t step = 0; step < steps; step += chunk) {
          const int64_t column = step * a_step;
          const int at_once = static_cast<int>(std::min(chunk, steps - step));
          const std::byte* lying = x.data + first * row_bytes + column * size;
          if (copy) {
            kernels.load_tile(lying, row_bytes, rows,
                              static_cast<int>(std::min(chunk * a_step, shape.columns() - column)),
                              tile);
          }
          for (int64_t p = 0; p < count; ++p) {
            for (int part = 0; part < Parts; ++part) {
              const std::byte* panel = weights[part]->panel(first_panel + p) + step * kStepBytes;
              const Fetch fetch =
                  few ? Fetch{weights[part]->panel(first_panel + p + 1) + (t * steps + step) * share,
                              share, true}
                      : Fetch{panel + kFetchAhead, kStepBytes, tiles > 1};
              kernels.multiply(panel, copy ? tile : lying, copy ? kTileStride : row_bytes, rows,
                               at_once, sums + (p * Parts + part) * panel_sums, fetch);
            }
          }
        }
        for (int64_t p = 0; p < count; ++p) {
          float* of_parts[Parts];
          for (int part = 0; part < Parts; ++part) {
            of_parts[part] = sums + (p * Parts + part) * panel_sums;
          }
          finish(first_panel + p, first, rows, of_parts);
        }
      }
    }
  }
}

}  // namespace pagedkv
