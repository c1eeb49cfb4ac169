// One step of a product: a 4-byte value of a row times each 4-byte lane of a packed register, which
// is one float32 or a pair of bfloat16. Packed matrices and packed K/V are multiplied by the same
// steps. Include with PAGEDKV_ISA defined.
#pragma once

#include "simd.h"

namespace pagedkv::PAGEDKV_ISA {

// Accumulators that fit in the registers together with what they are made from.
#if defined(__AVX512F__)
constexpr int kRegisters = 24;
constexpr int kMaxRows = 12;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kRegisters = 12;
constexpr int kMaxRows = 6;
#else
constexpr int kRegisters = 6;
constexpr int kMaxRows = 3;
#endif

struct Float32Step {
  using Element = float;
  using Value = float;  // of a row, for one step
  static constexpr int kWidth = 1;  // elements of a lane

  static Wide accumulate(WideBits lanes, Value x, Wide sum) {
    return fma(reinterpret_cast<Wide>(lanes), splat(x), sum);
  }
  static void load(const float* x, int count, Value* out) {
    std::memcpy(out, x, count * sizeof(float));
  }
  // How many registers of weights are put down at a time, kGroup positions apart.
  static constexpr int kTogether = 1;
  static Wide power(Wide x) { return exp2(x); }
  // Writes weights, rounded to the element's type, behind the first j of a row, and adds what was
  // written to `total`.
  static Wide put(const Wide (&x)[kTogether], int j, Value* row, Wide total) {
    std::memcpy(row + j, x, sizeof x);
    return total + x[0];
  }
  // The bits of a lane that belong to the first `count` elements, none or more.
  static uint32_t seen(int count) { return count > 0 ? ~0u : 0; }
};

// Two bfloat16, widened (exact), the even k first.
struct WidenedStep {
  using Element = bfloat16;
  struct Value {
    float even, odd;
  };
  static constexpr int kWidth = 2;

  static Wide accumulate(WideBits lanes, Value x, Wide sum) {
    sum = fma(reinterpret_cast<Wide>(lanes << 16), splat(x.even), sum);
    return fma(reinterpret_cast<Wide>(lanes & 0xffff0000u), splat(x.odd), sum);
  }
  static void load(const bfloat16* x, int count, Value* out) {
    for (int k = 0; k + 1 < count; k += 2) out[k / 2] = {to_float(x[k]), to_float(x[k + 1])};
    if (count % 2) out[count / 2] = {to_float(x[count - 1]), 0.0f};
  }
  static constexpr int kTogether = 1;
  static Wide power(Wide x) { return exp2(x); }
  static Wide put(const Wide (&x)[kTogether], int j, Value* row, Wide total) {
    const Wide near = rounded(x[0]);
    std::memcpy(row + j / 2, &near, sizeof near);
    return total + near;
  }
  static uint32_t seen(int count) { return count > 1 ? ~0u : count > 0 ? 0xffffu : 0; }
};

#if defined(__AVX512BF16__)

// Two bfloat16 by the processor's own dot product.
struct PairStep {
  using Element = bfloat16;
  using Value = uint32_t;
  static constexpr int kWidth = 2;

  static Wide accumulate(WideBits lanes, Value x, Wide sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(lanes),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x))));
  }
  static void load(const bfloat16* x, int count, Value* out) {
    if (count % 2) out[count / 2] = 0;
    std::memcpy(out, x, count * sizeof(bfloat16));
  }
  static uint32_t seen(int count) { return WidenedStep::seen(count); }
  static constexpr int kTogether = 2;
  static Wide power(Wide x) { return exp2_near(x); }
  static Wide put(const Wide (&x)[kTogether], int j, Value* row, Wide total) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(x[1], x[0]);
    std::memcpy(row + j / 2, &pairs, sizeof pairs);
    return _mm512_dpbf16_ps(total, pairs, reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80)));
  }
};

#endif

}  // namespace pagedkv::PAGEDKV_ISA
