// What a decoder does with a row between its matrices, written once. A file for an instruction set
// defines PAGEDKV_ISA and includes this.
//
// Every function computes in float32 and rounds once. The bits of a result do not depend on the
// row's place: elements go by eights from the start of the row, the last of them padded.
#include "rows.h"

#include "layout.h"
#include "simd.h"

namespace pagedkv::PAGEDKV_ISA {

// The elements of a row from `i` on, as many as there are, then zeros.
inline Vec load_part(const float* p, int64_t i, int64_t count) {
  if (i + kLanes <= count) return load(p + i);
  float part[kLanes] = {};
  std::memcpy(part, p + i, (count - i) * sizeof(float));
  return load(part);
}

template <typename T>
inline void store_part(T* p, int64_t i, int64_t count, Vec x) {
  if (i + kLanes <= count) return store(p + i, x);
  T part[kLanes];
  store(part, x);
  std::memcpy(p + i, part, (count - i) * sizeof(T));
}

inline void put(float* p, Wide x) { store_wide(p, x); }

inline void put(bfloat16* p, Wide x) {
  const WideBits bits = reinterpret_cast<WideBits>(rounded(x)) >> 16;
  const auto halves = __builtin_convertvector(bits, HalfWide);
  std::memcpy(p, &halves, sizeof halves);
}

inline float sum_lanes(Vec x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

template <typename T>
void widen(const void* x, int64_t count, float* out) {
  const T* from = static_cast<const T*>(x);
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(from[i]);
}

template <typename T>
void round_row(const float* x, int64_t count, void* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_part(static_cast<T*>(out), i, count, load_part(x, i, count));
  }
}

template <typename T>
void rms_norm(const float* x, const float* weight, int64_t count, float epsilon, void* out) {
  Vec squares = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec part = load_part(x, i, count);
    squares = fma(part, part, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(count);
  const Vec scale = broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int64_t i = 0; i < count; i += kLanes) {
    store_part(static_cast<T*>(out), i, count,
               load_part(x, i, count) * scale * load_part(weight, i, count));
  }
}

template <typename T>
void rotate(const float* x, const float* cos, const float* sin, int64_t half, void* out) {
  T* to = static_cast<T*>(out);
  for (int64_t i = 0; i < half; i += kLanes) {
    const Vec a = load_part(x, i, half), b = load_part(x + half, i, half);
    const Vec c = load_part(cos, i, half), s = load_part(sin, i, half);
    store_part(to, i, half, a * c - b * s);
    store_part(to + half, i, half, b * c + a * s);
  }
}

// gate / (1 + e^-gate) * up, by a power that cannot overflow: of -|gate|.
inline Wide silu_mul(Wide gate, Wide up) {
  const Wide negative = larger(gate, -gate) * splat(-1.44269504088896341f);
  const Wide power = exp2(negative);
  return (gate < splat(0.0f) ? gate * power : gate) / (splat(1.0f) + power) * up;
}

template <typename T>
void silu_mul(const float* gate, const float* up, int64_t count, void* out) {
  T* to = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + kWideLanes <= count; i += kWideLanes) {
    put(to + i, silu_mul(load_wide(gate + i), load_wide(up + i)));
  }
  if (i == count) return;
  // The rest goes through the same vector code: the bits of a whole vector's elements.
  float last_gate[kWideLanes] = {}, last_up[kWideLanes] = {};
  T last[kWideLanes];
  std::memcpy(last_gate, gate + i, (count - i) * sizeof(float));
  std::memcpy(last_up, up + i, (count - i) * sizeof(float));
  put(last, silu_mul(load_wide(last_gate), load_wide(last_up)));
  std::memcpy(to + i, last, (count - i) * sizeof(T));
}

inline int32_t largest(const float* x, int64_t count) {
  WideInts most[kGroupVectors];
  const auto take = [&](const float* group) {
    for (int v = 0; v < kGroupVectors; ++v) {
      const WideInts part = order(load_wide(group + v * kWideLanes));
      most[v] = part > most[v] ? part : most[v];
    }
  };
  for (WideInts& lanes : most) lanes = WideInts{} + INT32_MIN;
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) take(x + i);
  if (i < count) {
    float last[kGroup];
    for (int n = 0; n < kGroup; ++n) last[n] = x[i + n < count ? i + n : i];
    take(last);
  }
  return folded<IntVec>(most, [](IntVec a, IntVec b) { return a > b ? a : b; });
}

template <typename T>
constexpr RowKernels row_table() {
  return {widen<T>, round_row<T>, rms_norm<T>, rotate<T>, silu_mul<T>, largest};
}

}  // namespace pagedkv::PAGEDKV_ISA
