// The native kernels without Python, for processors that the tests do not run on: products, rows
// and attention of every instruction set that there is, against double precision; and the bits of
// a row alone against those in a batch. With the argument "broken" one weight is wrong, which has
// to be found.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "linear.h"
#include "memory.h"

namespace pagedkv {
namespace {

int failures = 0;

void expect(bool holds, const std::string& what, double figure = 0.0) {
  std::printf("%s %s %.3g\n", holds ? "ok  " : "FAIL", what.c_str(), figure);
  failures += holds ? 0 : 1;
}

double value_of(const std::byte* p, DType dtype) {
  uint32_t bits = 0;
  if (dtype == DType::kFloat32) {
    std::memcpy(&bits, p, 4);
  } else {
    uint16_t half;
    std::memcpy(&half, p, 2);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Numbers of a type in one row after the other, and what they are in double precision.
struct Numbers {
  Numbers(DType type, int64_t count) : dtype(type), bytes(count * size_of(type)) {}

  static Numbers random(DType dtype, int64_t count, std::mt19937& generator) {
    std::normal_distribution<float> normal;
    Numbers numbers(dtype, count);
    for (int64_t i = 0; i < count; ++i) {
      const float value = normal(generator);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      std::byte* p = numbers.bytes.data() + i * size_of(dtype);
      if (dtype == DType::kFloat32) std::memcpy(p, &value, 4);
      if (dtype == DType::kBfloat16) std::memcpy(p, &half, 2);
    }
    return numbers;
  }

  double operator[](int64_t i) const { return value_of(bytes.data() + i * size_of(dtype), dtype); }
  std::byte* at(int64_t i) { return bytes.data() + i * size_of(dtype); }

  DType dtype;
  std::vector<std::byte> bytes;
};

double tolerance(DType dtype) { return dtype == DType::kFloat32 ? 1e-4 : 2e-2; }

void check_linear(const std::string& isa, DType dtype, bool broken) {
  const std::string what = "linear " + isa + (dtype == DType::kFloat32 ? " f32" : " bf16");
  constexpr int64_t kInputs = 577, kOutputs = 65, kRows = 13;
  std::mt19937 generator(1);
  Numbers weight = Numbers::random(dtype, kOutputs * kInputs, generator);
  Numbers x = Numbers::random(dtype, kRows * kInputs, generator);
  std::vector<float> bias(round_up(kOutputs, kPanel), 0.5f);
  PackedMatrix packed(kOutputs, kInputs, dtype);
  packed.write(0, kOutputs, {weight.at(0), kInputs});
  if (broken) std::memset(weight.at(kInputs), 0, size_of(dtype));
  const LinearKernels& kernels = linear_kernels_for(isa, dtype);
  Numbers out(dtype, kRows * kOutputs), alone(dtype, kOutputs);
  linear(kernels, packed, bias.data(), {x.at(0), kInputs}, {out.at(0), kOutputs}, kRows);
  double worst = 0.0;
  bool same = true;
  for (int64_t row = 0; row < kRows; ++row) {
    linear(kernels, packed, bias.data(), {x.at(row * kInputs), kInputs}, {alone.at(0), kOutputs}, 1);
    same &= !std::memcmp(alone.at(0), out.at(row * kOutputs), alone.bytes.size());
    for (int64_t n = 0; n < kOutputs; ++n) {
      double want = bias[n];
      for (int64_t k = 0; k < kInputs; ++k) want += x[row * kInputs + k] * weight[n * kInputs + k];
      const double error = std::fabs(out[row * kOutputs + n] - want);
      worst = std::max(worst, error / std::max(1.0, std::fabs(want)));
    }
  }
  expect(worst < tolerance(dtype), what, worst);
  expect(same, what + ", rows alone");
}

void check_rows(const std::string& isa, DType dtype) {
  const std::string what = "rows " + isa + (dtype == DType::kFloat32 ? " f32" : " bf16");
  constexpr int64_t kCount = 77, kHalf = 21;
  std::mt19937 generator(2);
  std::normal_distribution<float> normal;
  std::vector<float> a(kCount), b(kCount);
  for (int64_t i = 0; i < kCount; ++i) a[i] = 3 * normal(generator), b[i] = normal(generator);
  const RowKernels& kernels = row_kernels_for(isa, dtype);
  Numbers out(dtype, kCount);
  double squares = 0.0, worst = 0.0;
  const auto compare = [&](int64_t i, double want) {
    worst = std::max(worst, std::fabs(out[i] - want) / std::max(1.0, std::fabs(want)));
  };
  for (float x : a) squares += static_cast<double>(x) * x;
  kernels.rms_norm(a.data(), b.data(), kCount, 1e-5f, out.at(0));
  for (int64_t i = 0; i < kCount; ++i) compare(i, a[i] / std::sqrt(squares / kCount + 1e-5) * b[i]);
  kernels.silu_mul(a.data(), b.data(), kCount, out.at(0));
  for (int64_t i = 0; i < kCount; ++i) compare(i, a[i] / (1.0 + std::exp(-a[i])) * b[i]);
  kernels.rotate(a.data(), b.data(), b.data() + kHalf, kHalf, out.at(0));
  for (int64_t i = 0; i < kHalf; ++i) {
    compare(i, double(a[i]) * b[i] - double(a[kHalf + i]) * b[kHalf + i]);
    compare(kHalf + i, double(a[kHalf + i]) * b[i] + double(a[i]) * b[kHalf + i]);
  }
  expect(worst < tolerance(dtype), what, worst);
}

// Prefills of sequences of several lengths in one step, over blocks in descending order.
class AttentionCheck {
 public:
  AttentionCheck(const std::string& isa, DType dtype, int64_t block_size)
      : isa_(isa), dtype_(dtype), block_size_(block_size), q_(dtype, 0), k_(dtype, 0), v_(dtype, 0) {
    std::mt19937 generator(3);
    for (int32_t length : lengths_) tokens_ += length, blocks_ += ceil_div(length, block_size);
    q_ = Numbers::random(dtype, tokens_ * kHeads * kDim, generator);
    k_ = Numbers::random(dtype, tokens_ * kKvHeads * kDim, generator);
    v_ = Numbers::random(dtype, tokens_ * kKvHeads * kDim, generator);
  }

  void check() {
    const std::string what = "attention " + isa_ + (dtype_ == DType::kFloat32 ? " f32" : " bf16") +
                             " B=" + std::to_string(block_size_);
    Numbers out = attend(lengths_, 0);
    double worst = 0.0;
    bool same = true;
    int64_t first = 0;
    for (int32_t length : lengths_) {
      Numbers alone = attend({length}, first);
      same &= !std::memcmp(alone.at(0), out.at(first * kHeads * kDim), alone.bytes.size());
      for (int64_t t = 0; t < length; ++t) {
        for (int64_t h = 0; h < kHeads; ++h) worst = std::max(worst, error(out, first, t, h));
      }
      first += length;
    }
    expect(worst < tolerance(dtype_), what, worst);
    expect(same, what + ", rows alone");
  }

 private:
  static constexpr int64_t kHeads = 6, kKvHeads = 2, kDim = 42;

  Numbers attend(std::vector<int32_t> lengths, int64_t first) {
    const int64_t padded = round_up(kDim, kLanes), width = ceil_div(300, block_size_);
    const Layout layout{1, blocks_ + 1, kKvHeads, block_size_, padded, step_of(dtype_)};
    const size_t bytes = layout.layer_stride() * size_of(dtype_);
    std::byte* memory = allocate_zeroed(bytes);
    Attention attention({memory, dtype_, layout, kDim}, kernels_for(isa_, dtype_), kHeads,
                        1.0f / std::sqrt(static_cast<float>(kDim)));
    std::vector<int32_t> tables(lengths.size() * width, 0);
    std::vector<int64_t> slots;
    int32_t block = static_cast<int32_t>(blocks_);
    for (size_t row = 0; row < lengths.size(); ++row) {
      for (int64_t t = 0; t < lengths[row]; ++t) {
        int32_t& entry = tables[row * width + t / block_size_];
        if (t % block_size_ == 0) entry = block--;
        slots.push_back(entry * block_size_ + t % block_size_);
      }
    }
    Plan plan(attention.shape(), lengths, lengths, tables, width, slots, 2, true);
    attention.prepare(plan);
    Numbers out(dtype_, static_cast<int64_t>(slots.size()) * kHeads * kDim);
    attention.run(plan, 0, {q_.at(first * kHeads * kDim), kHeads * kDim, kDim},
                  {k_.at(first * kKvHeads * kDim), kKvHeads * kDim, kDim},
                  {v_.at(first * kKvHeads * kDim), kKvHeads * kDim, kDim},
                  {out.at(0), kHeads * kDim, kDim});
    release(memory, bytes);
    return out;
  }

  double error(const Numbers& out, int64_t first, int64_t t, int64_t head) const {
    const int64_t q = ((first + t) * kHeads + head) * kDim;
    const auto kv = [&](int64_t s) {
      return ((first + s) * kKvHeads + head / (kHeads / kKvHeads)) * kDim;
    };
    std::vector<double> weights;
    double total = 0.0;
    for (int64_t s = 0; s <= t; ++s) {
      double score = 0.0;
      for (int64_t d = 0; d < kDim; ++d) score += q_[q + d] * k_[kv(s) + d];
      weights.push_back(std::exp(score / std::sqrt(double(kDim))));
      total += weights.back();
    }
    double worst = 0.0;
    for (int64_t d = 0; d < kDim; ++d) {
      double want = 0.0;
      for (int64_t s = 0; s <= t; ++s) want += weights[s] / total * v_[kv(s) + d];
      worst = std::max(worst, std::fabs(out[q + d] - want));
    }
    return worst;
  }

  std::string isa_;
  DType dtype_;
  int64_t block_size_, tokens_ = 0, blocks_ = 0;
  const std::vector<int32_t> lengths_{1, 37, 140};
  Numbers q_, k_, v_;
};

}  // namespace
}  // namespace pagedkv

int main(int argc, char** argv) {
  using namespace pagedkv;
  const bool broken = argc > 1 && !std::strcmp(argv[1], "broken");
  for (const std::string& isa : available_isas()) {
    for (DType dtype : {DType::kFloat32, DType::kBfloat16}) {
      check_linear(isa, dtype, broken);
      check_rows(isa, dtype);
      for (int64_t block_size : {16, 3}) AttentionCheck(isa, dtype, block_size).check();
    }
  }
  return failures ? 1 : 0;
}
