// The kernels of attention, written once. A file for an instruction set defines PAGEDKV_ISA and
// includes this; CMake gives that file its compiler flags.
//
// Determinism: a score has one accumulator and goes over d in ascending order; weights are summed in
// 16 lanes, each of which has certain positions of the span, then by one tree; a value's element has one accumulator and goes over the span's
// positions in ascending order; spans merge in order. None of it depends on how many vectors or
// registers share a loop.
#include "kernels.h"
#include "steps.inl"

namespace pagedkv::PAGEDKV_ISA {

constexpr float kMinusInfinity = -__builtin_inff();
// Registers of K or V that M rows take at a time.
template <int M>
constexpr int kColumns = M * 4 <= kRegisters ? 4 : 2;

template <typename Step>
constexpr int query_stride(int padded_dim) {
  return padded_dim * 4 / static_cast<int>(sizeof(typename Step::Value));
}

template <typename Step>
void load_query(const std::byte* query, int dim, int padded_dim, std::byte* out) {
  std::memset(out, 0, padded_dim * 4);
  Step::load(reinterpret_cast<const typename Step::Element*>(query), dim,
             reinterpret_cast<typename Step::Value*>(out));
}

template <typename T>
void store_output(const float* accumulated, float total, int dim, std::byte* out) {
  T* target = reinterpret_cast<T*>(out);
  const float inverse = 1.0f / total;
  for (int d = 0; d < dim; ++d) from_float(accumulated[d] * inverse, target + d);
}

// By how much the old and the new states of vectors, one a lane, weigh; the one of the larger
// maximum by one.
struct Blend {
  Wide old_weight, new_weight;
};

inline Blend blend(Wide from_maximum, Wide from_sum, Wide& maximum, Wide& total) {
  const auto rises = from_maximum > maximum;
  const Wide one = splat(1.0f);
  const Wide less = exp2(rises ? maximum - from_maximum : from_maximum - maximum);
  const Blend weights = {rises ? less : one, rises ? one : less};
  maximum = rises ? from_maximum : maximum;
  total = total * weights.old_weight + from_sum * weights.new_weight;
  return weights;
}

// acc = acc * old_weight + from * new_weight.
inline void blend_into(float* accumulated, Wide from, Wide old_weight, Wide new_weight) {
  store_wide(accumulated, fma(load_wide(accumulated), old_weight, from * new_weight));
}

inline void merge(int padded_state, float from_maximum, float from_sum, const float* from,
                  float* maximum, float* total, float* accumulated) {
  Wide maxima = splat(*maximum), sums = splat(*total);
  const Blend weights = blend(splat(from_maximum), splat(from_sum), maxima, sums);
  *maximum = maxima[0];
  *total = sums[0];
  for (int d = 0; d < padded_state; d += kWideLanes) {
    blend_into(accumulated + d, load_wide(from + d), weights.old_weight, weights.new_weight);
  }
}

// A packed register; of its lanes, those from `lanes` on are not read.
inline WideBits load_lanes(const std::byte* p, int lanes) {
#if defined(__AVX512F__)
  if (lanes < kWideLanes) {
    return reinterpret_cast<WideBits>(
        _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << lanes) - 1), p));
  }
#else
  (void)lanes;
#endif
  WideBits out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

// V registers that are multiplied together: where their first steps lie, and where memory lies
// that is read next, as much of it and in the same order. A table scatters groups over memory where
// the hardware cannot foresee them.
template <int V>
struct Columns {
  const std::byte* now[V];
  const std::byte* next[V];
};

// acc[m][v] += rows m of x times register v, step by step. The last register has `lanes` lanes.
template <typename Step, int M, int V>
[[gnu::always_inline]] inline void accumulate(const Columns<V>& columns, int64_t stride, int lanes,
                                              const typename Step::Value* x, int x_stride,
                                              int steps, Wide (&acc)[M][V]) {
  for (int s = 0; s < steps; ++s) {
    WideBits packed[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      packed[v] = load_lanes(columns.now[v] + s * stride, v + 1 < V ? kWideLanes : lanes);
      __builtin_prefetch(columns.next[v] + s * stride);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const typename Step::Value value = x[m * x_stride + s];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[m][v] = Step::accumulate(packed[v], value, acc[m][v]);
    }
  }
}

template <int M, int V>
[[gnu::always_inline]] inline void clear(Wide (&acc)[M][V]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[m][v] = splat(0.0f);
  }
}

// Vectors i ... i + M - 1 of a task, which share the loads of K and V.
template <typename Step, int M>
struct Rows {
  using Value = typename Step::Value;
  static constexpr int kScores = kScoreStride * 4 / sizeof(Value);  // between rows of weights

  const SpanTask& task;
  int i;
  bool leads;  // the first vectors of a tile wait for memory
  static constexpr int kPadded = (M + kWideLanes - 1) / kWideLanes * kWideLanes;
  alignas(64) float old_weights[kPadded], new_weights[kPadded];  // of the state, of the span

  const int32_t* limits() const { return task.limits + i; }
  int seen() const { return limits()[M - 1]; }

  // Scores of V registers of positions, from position `first` of the span on.
  template <int V>
  void score(int first) const {
    Columns<V> columns;
    for (int v = 0; v < V; ++v) {
      const int position = first + v * kWideLanes;
      const int64_t lane = position % kGroup * 4;
      columns.now[v] = task.span->keys[position / kGroup] + lane;
      columns.next[v] = leads ? task.span->values[position / kGroup] + lane : columns.now[v];
    }
    const int stride = query_stride<Step>(task.padded_dim);
    Wide acc[M][V];
    clear(acc);
    accumulate<Step, M, V>(columns, kGroup * 4, kWideLanes,
                           reinterpret_cast<const Value*>(task.queries) + i * stride, stride,
                           task.padded_dim / Step::kWidth, acc);
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) {
        store_wide(task.scores + m * kScoreStride + first + v * kWideLanes, acc[m][v]);
      }
    }
  }

  template <int V>
  void score_all(int first) const {
    const int end = static_cast<int>(round_up(seen(), kGroup));
    for (; first + V * kWideLanes <= end; first += V * kWideLanes) score<V>(first);
    if constexpr (V > kGroupVectors) {
      if (first < end) score_all<V / 2>(first);
    }
  }

  // Positions of row m that are weighed: what it sees, up to whole registers of weights.
  int weighed(int m) const {
    return static_cast<int>(round_up(limits()[m], kGroup * Step::kTogether));
  }

  // The largest score that row m sees; what it does not see becomes minus infinity.
  float highest(int m) const {
    float* row = task.scores + m * kScoreStride;
    const int limit = limits()[m], end = weighed(m);
    for (int j = limit; j < end; ++j) row[j] = kMinusInfinity;
    Wide most[kGroupVectors];
    for (int v = 0; v < kGroupVectors; ++v) most[v] = load_wide(row + v * kWideLanes);
    for (int j = kGroup; j < end; j += kGroup) {
      for (int v = 0; v < kGroupVectors; ++v) {
        most[v] = larger(most[v], load_wide(row + j + v * kWideLanes));
      }
    }
    return maximum(most);
  }

  // Row m's scores become weights relative to `top`, which is their maximum `most`, scaled, in place.
  // Returns the sum of the weights.
  float weigh(int m, float most, float top) const {
    constexpr int kTogether = Step::kTogether;
    float* row = task.scores + m * kScoreStride;
    // Beyond 2^24 what rounding leaves of `top` is whole powers of two, and may leave no finite
    // weight: scores are then taken relative to their maximum before they are scaled.
    if (!(__builtin_fabsf(top) < 0x1p24f)) {
      for (int j = 0; j < weighed(m); ++j) row[j] -= most;
      top = 0.0f;
    }
    Wide total[kGroupVectors];
    for (int v = 0; v < kGroupVectors; ++v) total[v] = splat(0.0f);
    for (int j = 0; j < weighed(m); j += kGroup * kTogether) {
      for (int v = 0; v < kGroupVectors; ++v) {
        const int at = j + v * kWideLanes;
        Wide weights[kTogether];
#pragma GCC unroll 2
        for (int i = 0; i < kTogether; ++i) {
          const Wide score = load_wide(row + at + i * kGroup);
          weights[i] = Step::power(fma(score, splat(task.scale), splat(-top)));
        }
        total[v] = Step::put(weights, at, reinterpret_cast<Value*>(row), total[v]);
      }
    }
    return sum(total);
  }

  // Scores become weights, which the states take up but for the values.
  void soften() {
    alignas(64) float tops[kPadded], totals[kPadded], maxima[kPadded], sums[kPadded];
    float most[M];
    for (int m = 0; m < M; ++m) most[m] = highest(m);
    for (int m = 0; m < M; ++m) tops[m] = most[m] * task.scale;
    for (int m = 0; m < M; ++m) totals[m] = weigh(m, most[m], tops[m]);
    for (int m = M; m < kPadded; ++m) tops[m] = totals[m] = maxima[m] = sums[m] = 0.0f;
    std::memcpy(maxima, task.maximum + i, M * sizeof(float));
    std::memcpy(sums, task.sum + i, M * sizeof(float));
    for (int m = 0; m < kPadded; m += kWideLanes) {
      Wide maximum = load_wide(maxima + m), total = load_wide(sums + m);
      const Blend weights = blend(load_wide(tops + m), load_wide(totals + m), maximum, total);
      store_wide(maxima + m, maximum);
      store_wide(sums + m, total);
      store_wide(old_weights + m, weights.old_weight);
      store_wide(new_weights + m, weights.new_weight);
    }
    std::memcpy(task.maximum + i, maxima, M * sizeof(float));
    std::memcpy(task.sum + i, sums, M * sizeof(float));
  }

  // V registers of the weighted values, from element d on, merged into the rows' states.
  template <int V>
  void mix(int d) const {
    constexpr int kSteps = kGroup / Step::kWidth;
    const int64_t stride = task.padded_dim * 4;
    const int state = static_cast<int>(padded_state(task.padded_dim));
    const int rest = task.padded_dim - d - (V - 1) * kWideLanes;
    const int lanes = rest < kWideLanes ? rest : kWideLanes;
    const Value* x = reinterpret_cast<const Value*>(task.scores);
    const int whole = limits()[0] / Step::kWidth;  // steps that every row sees
    Wide acc[M][V];
    clear(acc);
    Columns<V> columns;
    int first = 0;
    for (; first < whole; first += kSteps) {
      const int group = first / kSteps;
      for (int v = 0; v < V; ++v) {
        const int64_t lane = (d + v * kWideLanes) * 4;
        columns.now[v] = task.span->values[group] + lane;
        columns.next[v] =
            leads && group < task.next->count ? task.next->keys[group] + lane : columns.now[v];
      }
      accumulate<Step, M, V>(columns, stride, lanes, x + first, kScores,
                             whole - first < kSteps ? whole - first : kSteps, acc);
    }
    // A vector never touches what it must not see: not even NaN there can reach it.
    for (int s = whole; s * Step::kWidth < seen(); ++s) {
      const std::byte* step = task.span->values[s / kSteps] + s % kSteps * stride + d * 4;
      WideBits packed[V];
      for (int v = 0; v < V; ++v) {
        packed[v] = load_lanes(step + v * sizeof(Wide), v + 1 < V ? kWideLanes : lanes);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const uint32_t mask = Step::seen(limits()[m] - s * Step::kWidth);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          acc[m][v] = mask ? Step::accumulate(packed[v] & mask, x[m * kScores + s], acc[m][v])
                           : acc[m][v];
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      float* out = task.accumulated + (i + m) * state + d;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v, out += kWideLanes) {
        blend_into(out, acc[m][v], splat(old_weights[m]), splat(new_weights[m]));
      }
    }
  }

  template <int V>
  void mix_all(int d) const {
    for (; d + (V - 1) * kWideLanes < task.padded_dim; d += V * kWideLanes) mix<V>(d);
    if constexpr (V > 1) {
      if (d < task.padded_dim) mix_all<V / 2>(d);
    }
  }

  void attend() {
    score_all<kColumns<M>>(0);
    soften();
    mix_all<kColumns<M>>(0);
  }
};

template <typename Step, int M>
void attend_rows(const SpanTask& task, int i, int rows) {
  if constexpr (M > 1) {
    if (rows < M) return attend_rows<Step, M - 1>(task, i, rows);
  }
  static_assert(M * kColumns<M> <= kRegisters);
  Rows<Step, M>{task, i, i == task.first, {}, {}}.attend();
}

template <typename Step>
void attend_span(const SpanTask& task) {
  static_assert(kMaxRows <= kTileRows);
  // One line of each group is fetched a whole span ahead, and with it the address of its page.
  for (int g = 0; g < task.next->count; ++g) __builtin_prefetch(task.next->keys[g], 0, 2);
  for (int i = task.first; i < task.count; i += kMaxRows) {
    attend_rows<Step, kMaxRows>(task, i, task.count - i < kMaxRows ? task.count - i : kMaxRows);
  }
}

template <typename Step>
constexpr Kernels table() {
  using T = typename Step::Element;
  return {load_query<Step>, attend_span<Step>, merge, store_output<T>};
}

}  // namespace pagedkv::PAGEDKV_ISA
