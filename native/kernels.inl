// The kernels, written once. A file for an instruction set defines PAGEDKV_ISA
// and includes this; CMake gives that file its compiler flags.
//
// Determinism: a dot product accumulates over d in vectors, then by one tree of lanes; weights
// are summed by (position mod 8), then by one tree; values accumulate position by position; spans
// merge in order. None of it depends on how many vectors or keys share a loop.
#include "kernels.h"
#include "simd.h"

namespace pagedkv::PAGEDKV_ISA {

constexpr float kMinusInfinity = -__builtin_inff();
// From this many query vectors on, bfloat16 rows are widened once for all of them (exact).
constexpr int kWidenFrom = 9;
// From this many on, keys are transposed once for all of them.
constexpr int kTransposeFrom = 16;
// Keys of a transposed block: lane n of a block's d-th row is key n's d-th element.
constexpr int kColumns = 2 * kWideLanes;
static_assert(kSpan % kColumns == 0);
// Query vectors that share the loads of a transposed block: two accumulators for each of its
// registers.
#if defined(__AVX512F__)
constexpr int kColumnVectors = 6;
#else
constexpr int kColumnVectors = 3;
#endif

template <typename T>
const T* row(const void* const* rows, int j) {
  return static_cast<const T*>(rows[j]);
}

template <typename T>
void load_query(const void* query, float scale, int dim, int padded_dim, float* out) {
  const T* source = static_cast<const T*>(query);
  for (int d = 0; d < dim; ++d) out[d] = to_float(source[d]) * scale;
  for (int d = dim; d < padded_dim; ++d) out[d] = 0.0f;
}

template <typename T>
void store_output(const float* accumulated, float total, int dim, void* out) {
  T* target = static_cast<T*>(out);
  const float inverse = 1.0f / total;
  for (int d = 0; d < dim; ++d) from_float(accumulated[d] * inverse, target + d);
}

inline void merge(int padded_dim, float from_maximum, float from_sum, const float* from,
                  float* maximum, float* total, float* accumulated) {
  const float both = from_maximum > *maximum ? from_maximum : *maximum;
  const Vec old_weight = broadcast(exp(*maximum - both));
  const Vec new_weight = broadcast(exp(from_maximum - both));
  *maximum = both;
  *total = fma(broadcast(*total), old_weight, broadcast(from_sum) * new_weight)[0];
  for (int d = 0; d < padded_dim; d += kLanes) {
    store(accumulated + d, fma(load(accumulated + d), old_weight, load(from + d) * new_weight));
  }
}

// Scores of M query vectors against N keys (N a multiple of 4).
template <typename T, int M, int N>
inline void dots(const void* const* keys, const float* queries, int padded_dim, float* scores) {
  Vec acc[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) acc[m][n] = broadcast(0.0f);
  }
  const T* rows[N];
  for (int n = 0; n < N; ++n) rows[n] = row<T>(keys, n);
  for (int d = 0; d < padded_dim; d += kLanes) {
    Vec q[M];
    for (int m = 0; m < M; ++m) q[m] = load(queries + m * padded_dim + d);
    for (int n = 0; n < N; ++n) {
      const Vec k = load(rows[n] + d);
      for (int m = 0; m < M; ++m) acc[m][n] = fma(q[m], k, acc[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; n += 4) reduce4(&acc[m][n], scores + m * kSpan + n);
  }
}

// Scores of M query vectors against a transposed block of keys, with the bits of `dots`: an
// accumulator for each d mod 8, and the same tree over the eight. Two of them at a time.
template <int M>
inline void dots_transposed(const float* block, const float* queries, int padded_dim,
                            float* scores) {
  Wide pairs[4][M][2];
  for (int pair = 0; pair < 4; ++pair) {
    Wide acc[M][2][2];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      acc[m][0][0] = acc[m][0][1] = acc[m][1][0] = acc[m][1][1] = splat(0.0f);
    }
    for (int d = 2 * pair; d < padded_dim; d += kLanes) {
#pragma GCC unroll 2
      for (int e = 0; e < 2; ++e) {
        const Wide low = load_wide(block + (d + e) * kColumns);
        const Wide high = load_wide(block + (d + e) * kColumns + kWideLanes);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const Wide q = splat(queries[m * padded_dim + d + e]);
          acc[m][0][e] = fma(q, low, acc[m][0][e]);
          acc[m][1][e] = fma(q, high, acc[m][1][e]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      pairs[pair][m][0] = acc[m][0][0] + acc[m][0][1];
      pairs[pair][m][1] = acc[m][1][0] + acc[m][1][1];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      store_wide(scores + m * kSpan + half * kWideLanes,
                 (pairs[0][m][half] + pairs[1][m][half]) +
                     (pairs[2][m][half] + pairs[3][m][half]));
    }
  }
}

// A table scatters rows over memory where the hardware cannot foresee them; it is told here.
template <typename T>
inline void prefetch(const void* const* rows, int begin, int end, int padded_dim) {
  for (int j = begin; j < end; ++j) {
    const char* line = static_cast<const char*>(rows[j]);
    const char* after = line + padded_dim * sizeof(T);
    for (; line < after; line += 64) __builtin_prefetch(line);
  }
}

// Values [begin, end), and as many of the next span's keys.
template <typename T>
inline void fetch_ahead(const SpanTask& task, const void* const* values, int begin, int end) {
  prefetch<T>(values, begin, end, task.padded_dim);
  prefetch<T>(task.next_keys, begin, end < task.num_next ? end : task.num_next, task.padded_dim);
}

// Turns the first n scores into weights relative to their maximum, in place.
inline void soften(float* scores, int n, float* out_maximum, float* out_sum) {
  const int whole = static_cast<int>(round_up(n, kLanes));
  for (int j = n; j < whole; ++j) scores[j] = kMinusInfinity;
  Vec highest = load(scores);
  for (int j = kLanes; j < whole; j += kLanes) highest = larger(highest, load(scores + j));
  const float top = maximum(highest);
  Vec total = broadcast(0.0f);
  for (int j = 0; j < whole; j += kLanes) {
    const Vec weight = exp(load(scores + j) - top);
    store(scores + j, weight);
    total = total + weight;
  }
  *out_maximum = top;
  *out_sum = sum(total);
}

inline Vec load_as(const float* p, Vec) { return load(p); }
inline Vec load_as(const bfloat16* p, Vec) { return load(p); }
inline Vec broadcast_as(float x, Vec) { return broadcast(x); }
#if defined(__AVX512F__)
inline Wide load_as(const float* p, Wide) { return load_wide(p); }
inline Wide broadcast_as(float x, Wide) { return splat(x); }
#endif

// out[m][d ...] += weights[m][j] * values[j][d ...] for j in [begin, end), C vectors V of d.
template <typename V, typename T, int M, int C>
inline void mix(const void* const* values, int begin, int end, const float* weights, int d,
                int padded_dim, float* out) {
  constexpr int kStep = sizeof(V) / sizeof(float);
  V acc[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[m][c] = load_as(out + m * padded_dim + d + c * kStep, V{});
  }
  for (int j = begin; j < end; ++j) {
    const T* v = row<T>(values, j) + d;
    V w[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) w[m] = broadcast_as(weights[m * kSpan + j], V{});
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const V x = load_as(v + c * kStep, V{});
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][c] = fma(w[m], x, acc[m][c]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      std::memcpy(out + m * padded_dim + d + c * kStep, &acc[m][c], sizeof(V));
    }
  }
}

template <typename T, int M>
void mix_all(const void* const* values, int begin, int end, const float* weights,
             int padded_dim, float* out) {
  constexpr int kWide = M == 1 ? 8 : 4;
  if (begin == end) return;
  int d = 0;
  if constexpr (kWideLanes > kLanes && sizeof(T) == sizeof(float)) {
    for (; d + 4 * kWideLanes <= padded_dim; d += 4 * kWideLanes) {
      mix<Wide, T, M, 4>(values, begin, end, weights, d, padded_dim, out);
    }
  }
  for (; d + kWide * kLanes <= padded_dim; d += kWide * kLanes) {
    mix<Vec, T, M, kWide>(values, begin, end, weights, d, padded_dim, out);
  }
  for (; d + 2 * kLanes <= padded_dim; d += 2 * kLanes) {
    mix<Vec, T, M, 2>(values, begin, end, weights, d, padded_dim, out);
  }
  if (d < padded_dim) mix<Vec, T, M, 1>(values, begin, end, weights, d, padded_dim, out);
}

// Query vectors i ... i + M - 1 of the task: they share the loads of K and V.
// With `transposed`, the keys' blocks, `keys` is not read.
template <typename T, int M>
void attend_vectors(const SpanTask& task, const void* const* keys, const float* transposed,
                    const void* const* values, int i) {
  constexpr int N = M == 1 ? 8 : 4;
  static_assert(kKeyGroup % N == 0 && M <= kScoreRows);
  const int padded_dim = task.padded_dim;
  const int32_t* limits = task.limits + i;
  const float* queries = task.queries + i * padded_dim;
  if (transposed) {
    for (int j = 0; j < limits[M - 1]; j += kColumns) {
      dots_transposed<M>(transposed + j * padded_dim, queries, padded_dim, task.scores + j);
    }
  } else {
    const bool leads = i == task.first;  // the first vectors of a tile wait for memory
    for (int j = 0; j < limits[M - 1]; j += N) {
      if (leads) fetch_ahead<T>(task, values, j, j + N);
      dots<T, M, N>(keys + j, queries, padded_dim, task.scores + j);
    }
  }
  float top[M], total[M];
  for (int m = 0; m < M; ++m) soften(task.scores + m * kSpan, limits[m], &top[m], &total[m]);

  alignas(64) float mixed[M * kMaxHeadDim];
  std::memset(mixed, 0, sizeof(float) * M * padded_dim);
  mix_all<T, M>(values, 0, limits[0], task.scores, padded_dim, mixed);
  // Positions that only the later vectors see: a vector never touches what it must not see, so
  // not even NaN there can reach it.
  for (int m = 1; m < M; ++m) {
    mix_all<T, 1>(values, limits[0], limits[m], task.scores + m * kSpan, padded_dim,
                  mixed + m * padded_dim);
  }
  for (int m = 0; m < M; ++m) {
    merge(padded_dim, top[m], total[m], mixed + m * padded_dim, task.maximum + i + m,
          task.sum + i + m, task.accumulated + (i + m) * padded_dim);
  }
}

template <typename T>
void attend_vectors(const SpanTask& task, const void* const* keys, const float* transposed,
                    const void* const* values) {
  int i = task.first;
  if (transposed) {
    for (; i + kColumnVectors <= task.count; i += kColumnVectors) {
      attend_vectors<T, kColumnVectors>(task, keys, transposed, values, i);
    }
  }
  for (; i + 3 <= task.count; i += 3) attend_vectors<T, 3>(task, keys, transposed, values, i);
  if (task.count - i == 2) attend_vectors<T, 2>(task, keys, transposed, values, i);
  if (task.count - i == 1) attend_vectors<T, 1>(task, keys, transposed, values, i);
}

// The first `count` keys in blocks of kColumns; lanes beyond them are of other keys or undefined.
template <typename T>
void transpose(const SpanTask& task, int count, float* out) {
  for (int j = 0; j < count; j += kLanes) {
    fetch_ahead<T>(task, task.values, j, j + kLanes);
    float* target = out + j / kColumns * kColumns * task.padded_dim + j % kColumns;
    for (int d = 0; d < task.padded_dim; d += kLanes) {
      Vec rows[kLanes];
      for (int n = 0; n < kLanes; ++n) rows[n] = load(row<T>(task.keys, j + n) + d);
      transpose8(rows, target + d * kColumns, kColumns);
    }
  }
}

inline void widen(const void* const* rows, int count, int padded_dim, float* out,
                  const void** out_rows) {
  for (int j = 0; j < count; ++j) {
    float* target = out + j * padded_dim;
    for (int d = 0; d < padded_dim; d += kLanes) {
      store(target + d, load(row<bfloat16>(rows, j) + d));
    }
    out_rows[j] = target;
  }
  for (int j = count; j % kKeyGroup; ++j) out_rows[j] = out_rows[count - 1];
}

template <typename T>
void attend_span(const SpanTask& task) {
  const int vectors = task.count - task.first;
  const int count = task.limits[task.count - 1];
  const bool transposes = vectors >= kTransposeFrom;
  float* columns = transposes ? task.converted : nullptr;
  if (transposes) transpose<T>(task, count, columns);
  if (sizeof(T) == sizeof(float) || vectors < kWidenFrom) {
    attend_vectors<T>(task, task.keys, columns, task.values);
    return;
  }
  const void* keys[kSpan];
  const void* values[kSpan];
  if (!transposes) widen(task.keys, count, task.padded_dim, task.converted, keys);
  widen(task.values, count, task.padded_dim, task.converted + kSpan * task.padded_dim, values);
  attend_vectors<float>(task, keys, columns, values);
}

inline Vec silu_mul(Vec gate, Vec up) { return gate / (1.0f + exp(-gate)) * up; }

template <typename T>
void silu_mul(const void* gate, const void* up, int64_t count, void* out) {
  const T* g = static_cast<const T*>(gate);
  const T* u = static_cast<const T*>(up);
  T* o = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(o + i, silu_mul(load(g + i), load(u + i)));
  if (i == count) return;
  // The remainder goes through the same vector code: same bits as anywhere else.
  T last_gate[kLanes] = {}, last_up[kLanes] = {}, last_out[kLanes];
  std::memcpy(last_gate, g + i, (count - i) * sizeof(T));
  std::memcpy(last_up, u + i, (count - i) * sizeof(T));
  store(last_out, silu_mul(load(last_gate), load(last_up)));
  std::memcpy(o + i, last_out, (count - i) * sizeof(T));
}

template <typename T>
constexpr Kernels table() {
  return {load_query<T>, attend_span<T>, merge, store_output<T>, silu_mul<T>};
}

}  // namespace pagedkv::PAGEDKV_ISA
