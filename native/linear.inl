// The linear layers' kernels, written once. A file for an instruction set defines PAGEDKV_ISA and
// includes this.
//
// Determinism: lane n of a panel has one accumulator a row, and goes over k in ascending order.
// How many rows or lanes share a loop, and where a chunk of k ends (the accumulators are put down
// in float32 and taken up again), changes no bit.
#include "kernels.h"
#include "steps.inl"

namespace pagedkv::PAGEDKV_ISA {

constexpr int kPanelVectors = kPanel / kWideLanes;
// M rows by V vectors of a panel.
template <typename Step, int M, int V>
inline void multiply_part(const std::byte* panel, const std::byte* tile, int64_t tile_stride,
                          int steps, float* sums, const Fetch& fetch) {
  using Value = typename Step::Value;
  Wide acc[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      std::memcpy(&acc[m][v], sums + m * kPanel + v * kWideLanes, sizeof(Wide));
    }
  }
  for (int s = 0; s < steps; ++s) {
    const std::byte* step = panel + s * kStepBytes;
    const std::byte* ahead = fetch.from + s * fetch.stride;
    if (fetch.again) {
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + 64);
    } else {
      __builtin_prefetch(ahead, 0, 0);
      __builtin_prefetch(ahead + 64, 0, 0);
    }
    WideBits weights[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) std::memcpy(&weights[v], step + v * sizeof(Wide), sizeof(Wide));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Value x;
      std::memcpy(&x, tile + m * tile_stride + s * sizeof(Value), sizeof(Value));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[m][v] = Step::accumulate(weights[v], x, acc[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      std::memcpy(sums + m * kPanel + v * kWideLanes, &acc[m][v], sizeof(Wide));
    }
  }
}

template <typename Step, int M>
void multiply_rows(const std::byte* panel, const std::byte* tile, int64_t tile_stride, int rows,
                   int steps, float* sums, const Fetch& fetch) {
  if constexpr (M > 1) {
    if (rows < M) {
      return multiply_rows<Step, M - 1>(panel, tile, tile_stride, rows, steps, sums, fetch);
    }
  }
  constexpr int V = M * kPanelVectors <= kRegisters ? kPanelVectors : kPanelVectors / 2;
  static_assert(M * V <= kRegisters);
  for (int v = 0; v < kPanelVectors; v += V) {
    multiply_part<Step, M, V>(panel + v * sizeof(Wide), tile, tile_stride, steps,
                              sums + v * kWideLanes, fetch);
  }
}

template <typename Step>
void load_tile(const std::byte* x, int64_t stride, int rows, int count, std::byte* tile) {
  for (int m = 0; m < rows; ++m) {
    Step::load(reinterpret_cast<const typename Step::Element*>(x + m * stride), count,
               reinterpret_cast<typename Step::Value*>(tile + m * kTileStride));
  }
}

template <typename Step>
void store_row(const float* sums, const float* bias, int count, std::byte* out) {
  auto* target = reinterpret_cast<typename Step::Element*>(out);
  int n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    store(target + n, bias ? load(sums + n) + load(bias + n) : load(sums + n));
  }
  for (; n < count; ++n) from_float(bias ? sums[n] + bias[n] : sums[n], target + n);
}

template <typename Step>
constexpr LinearKernels linear_table() {
  static_assert(kMaxRows <= kTileRows);
  using Value = typename Step::Value;
  static_assert(kTileSteps * sizeof(Value) <= kTileStride);
  constexpr bool kInPlace = sizeof(Value) == Step::kWidth * sizeof(typename Step::Element);
  return {kMaxRows, kInPlace, load_tile<Step>, multiply_rows<Step, kMaxRows>, store_row<Step>};
}

}  // namespace pagedkv::PAGEDKV_ISA
