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
  // Values [j, j + kWideLanes) of a row, rounded to the element's type, which are returned.
  static Wide put(Wide x, int j, Value* row) {
    std::memcpy(row + j, &x, sizeof x);
    return x;
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
  static Wide put(Wide x, int j, Value* row) {
    x = rounded(x);
    std::memcpy(row + j / 2, &x, sizeof x);
    return x;
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
  static Wide put(Wide x, int j, Value* row) {
    const auto pairs = reinterpret_cast<HalfWide>(_mm512_cvtneps_pbh(x));
    std::memcpy(row + j / 2, &pairs, sizeof pairs);
    return reinterpret_cast<Wide>(__builtin_convertvector(pairs, WideBits) << 16);
  }
};

#endif

}  // namespace pagedkv::PAGEDKV_ISA
