// Eight floats at a time (Vec), or as many as a register holds (Wide), for the instruction set that
// the including file is compiled for.
// Include with PAGEDKV_ISA defined: each instruction set has its own namespace.
// Nothing here may be contracted or reassociated (-ffp-contract=off, no -ffast-math).
#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pagedkv::PAGEDKV_ISA {

typedef float Vec __attribute__((vector_size(32)));
typedef uint32_t UintVec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));
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

#if defined(__AVX2__) && defined(__FMA__)

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

#elif defined(__aarch64__)

// A register has half of the lanes.
inline Vec fma(Vec a, Vec b, Vec c) {
  float32x4_t x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; ++i) z[i] = vfmaq_f32(z[i], x[i], y[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
}

#else

inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }

#endif

#if defined(__AVX512F__)

typedef float Wide __attribute__((vector_size(64)));
typedef uint32_t WideBits __attribute__((vector_size(64)));
typedef int32_t WideInts __attribute__((vector_size(64)));
typedef uint16_t HalfWide __attribute__((vector_size(32)));

inline Wide splat(float x) { return _mm512_set1_ps(x); }
inline Wide fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }

#else

using Wide = Vec;
using WideBits = UintVec;
using WideInts = IntVec;
using HalfWide = HalfVec;

inline Wide splat(float x) { return broadcast(x); }

#endif

constexpr int kWideLanes = sizeof(Wide) / sizeof(float);

inline Wide load_wide(const float* p) {
  Wide out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

inline void store_wide(float* p, Wide x) { std::memcpy(p, &x, sizeof x); }

inline Wide larger(Wide a, Wide b) { return a > b ? a : b; }  // b where one is NaN

// Lanes folded by one tree: what a group of kGroup lanes, in one register or in two, comes to.
constexpr int kGroupVectors = kGroup / kWideLanes;

template <typename Half, typename Whole, typename Fold>
inline auto folded(const Whole (&group)[kGroupVectors], Fold fold) {
  Half half[2];
  static_assert(sizeof half == sizeof group);
  std::memcpy(half, group, sizeof half);
  Half x = fold(half[0], half[1]);
  x = fold(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = fold(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  x = fold(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
  return x[0];
}

inline float sum(const Wide (&group)[kGroupVectors]) {
  return folded<Vec>(group, [](Vec a, Vec b) { return a + b; });
}

inline float maximum(const Wide (&group)[kGroupVectors]) {
  return folded<Vec>(group, [](Vec a, Vec b) { return a > b ? a : b; });
}

// Integers in the order of the floats: -0 as 0, and any NaN above all others.
inline WideInts order(Wide x) {
  const WideInts bits = reinterpret_cast<WideInts>(x + splat(0.0f));
  const WideInts ordered = bits ^ ((bits >> 31) & 0x7fffffff);
  return x != x ? ordered * 0 + 0x7fffffff : ordered;
}

// Rounded to bfloat16: to nearest, ties to even; NaN stays NaN.
inline Wide rounded(Wide x) {
  const WideBits bits = reinterpret_cast<WideBits>(x);
  const WideBits nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return x != x ? x : reinterpret_cast<Wide>(nearest);
}

// 2^x for x <= 0 (and what rounding leaves above); 0 below -126.5, NaN for NaN. The coefficients are
// those of 2^f for |f| <= 1/2, the highest first. Without branches, so that a lane's bits do not
// depend on where it stands.
template <int N>
inline Wide exp2(Wide x, const float (&coefficients)[N]) {
  const Wide shift = splat(12582912.0f + 127.0f);  // adding 1.5 * 2^23 rounds to an integer
  x = larger(splat(-127.0f), x);
  const Wide biased = x + shift;  // its lowest bits are the exponent of the power of two
  const Wide f = x - (biased - shift);
  Wide p = splat(coefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < N; ++i) p = fma(p, f, splat(coefficients[i]));
  return p * reinterpret_cast<Wide>(reinterpret_cast<WideBits>(biased) << 23);
}

// Within 2 ulp. The polynomial of Cephes' exp2f (Moshier).
inline Wide exp2(Wide x) {
  constexpr float kCoefficients[] = {1.535336188319500e-4f, 1.339887440266574e-3f,
                                     9.618437357674640e-3f, 5.550332471162809e-2f,
                                     2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f};
  return exp2(x, kCoefficients);
}

// Within 3e-6 of it, a thousandth of what bfloat16 rounds off: the polynomial of degree 4 with the
// least relative error.
inline Wide exp2_near(Wide x) {
  constexpr float kCoefficients[] = {9.570102207e-3f, 5.591785908e-2f, 2.402474433e-1f,
                                     6.931217909e-1f, 9.999992847e-1f};
  return exp2(x, kCoefficients);
}

}  // namespace pagedkv::PAGEDKV_ISA
