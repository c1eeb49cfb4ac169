// Eight floats at a time (Vec), or as many as a register holds (Wide), for the instruction set that
// the including file is compiled for.
// Include with PAGEDKV_ISA defined: each instruction set has its own namespace.
// Nothing here may be contracted or reassociated (-ffp-contract=off, no -ffast-math).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace pagedkv::PAGEDKV_ISA {

typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));
typedef uint32_t UintVec __attribute__((vector_size(32)));
typedef uint16_t HalfVec __attribute__((vector_size(16)));

struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline void from_float(float x, float* out) { *out = x; }

// Round to nearest, ties to even; NaN stays NaN.
inline void from_float(float x, bfloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = x != x ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1);
  out->bits = static_cast<uint16_t>(bits >> 16);
}

inline Vec load(const float* p) {
  Vec out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

inline Vec load(const bfloat16* p) {
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  return reinterpret_cast<Vec>(__builtin_convertvector(half, UintVec) << 16);
}

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

inline void store(bfloat16* p, Vec x) {
  UintVec bits = reinterpret_cast<UintVec>(x);
  UintVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  UintVec nan = reinterpret_cast<UintVec>(x != x);
  HalfVec half =
      __builtin_convertvector(((nan & 0x7fc00000u) | (~nan & rounded)) >> 16, HalfVec);
  std::memcpy(p, &half, sizeof half);
}

inline Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x}; }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

#if defined(__AVX2__) && defined(__FMA__)

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// out[i] = sum of the lanes of x[i], all four by the same tree.
inline void reduce4(const Vec* x, float* out) {
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

#else

inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }

inline void reduce4(const Vec* x, float* out) {
  for (int i = 0; i < 4; ++i) {
    out[i] = ((x[i][0] + x[i][1]) + (x[i][2] + x[i][3])) +
             ((x[i][4] + x[i][5]) + (x[i][6] + x[i][7]));
  }
}

#endif

#if defined(__AVX512F__)

typedef float Wide __attribute__((vector_size(64)));
typedef uint32_t WideBits __attribute__((vector_size(64)));

inline Wide splat(float x) { return _mm512_set1_ps(x); }
inline Wide fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }

#else

using Wide = Vec;
using WideBits = UintVec;

inline Wide splat(float x) { return broadcast(x); }

#endif

constexpr int kWideLanes = sizeof(Wide) / sizeof(float);

inline Wide load_wide(const float* p) {
  Wide out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

inline void store_wide(float* p, Wide x) { std::memcpy(p, &x, sizeof x); }

// out[d * stride + n] = in[n][d], 8 by 8.
inline void transpose8(const Vec* in, float* out, int stride) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  }
#else
  for (int d = 0; d < 8; ++d) {
    for (int n = 0; n < 8; ++n) out[d * stride + n] = in[n][d];
  }
#endif
}

inline float sum(Vec x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

inline float maximum(Vec x) {
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = x[i] > out ? x[i] : out;
  return out;
}

// e^x within 2 ulp; 0 below -87, limited to e^88 above, NaN for NaN. Cody-Waite reduction and the
// polynomial of Cephes' expf (Moshier), without branches, so that a lane's bits do not depend on
// where it stands.
inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.0f), high = broadcast(88.0f);
  const Vec shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const IntVec vanishes = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vec n = fma(x, broadcast(1.44269504088896341f), shift) - shift;
  Vec f = fma(n, broadcast(-0.693359375f), x);
  f = fma(n, broadcast(2.12194440e-4f), f);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, f, broadcast(1.3981999507e-3f));
  p = fma(p, f, broadcast(8.3334519073e-3f));
  p = fma(p, f, broadcast(4.1665795894e-2f));
  p = fma(p, f, broadcast(1.6666665459e-1f));
  p = fma(p, f, broadcast(5.0000001201e-1f));
  p = fma(p, f * f, f) + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  p = p * reinterpret_cast<Vec>(power);
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) & ~vanishes);
}

inline float exp(float x) { return exp(broadcast(x))[0]; }

}  // namespace pagedkv::PAGEDKV_ISA
