#include "decoder.h"

#include <omp.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "product.h"

namespace pagedkv {
namespace {

// So few rows are normalised by each thread for itself: that takes less time than to meet once
// more.
constexpr int64_t kOwnRows = 4;

// Adds the bias of a panel, if there is one, to the sums of a tile.
void add_bias(const Projection& projection, int64_t panel, int rows, float* sums) {
  if (projection.bias.empty()) return;
  const float* bias = projection.bias.data() + panel * kPanel;
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < kPanel; ++n) sums[m * kPanel + n] += bias[n];
  }
}

template <typename T>
void grow(std::vector<T>& memory, int64_t size) {
  if (memory.size() < static_cast<size_t>(size)) memory.resize(static_cast<size_t>(size));
}

}  // namespace

Decoder::Decoder(const Config& config, std::vector<LayerWeights> layers, std::vector<float> norm,
                 std::shared_ptr<PackedMatrix> head, const LinearKernels& linear,
                 const RowKernels& rows, const RowKernels& float_rows)
    : config_(config),
      layers_(std::move(layers)),
      norm_(std::move(norm)),
      head_(std::move(head)),
      linear_(linear),
      rows_(rows),
      float_rows_(float_rows) {}

void Decoder::reserve(int64_t tokens, int64_t wanted, int threads) {
  const int64_t size = size_of(dtype()), head_dim = config_.head_dim;
  grow(residual_, tokens * config_.hidden);
  grow(projected_, tokens * heads() * head_dim);
  grow(rotated_, tokens * heads() * head_dim * size);
  grow(attended_, tokens * config_.num_heads * head_dim * size);
  grow(normed_, std::max({tokens, wanted, kOwnRows * threads}) * config_.hidden * size);
  grow(largest_, wanted * head_->panels());
  grow(wanted_residual_, wanted * config_.hidden);
  grow(wanted_attended_, wanted * config_.num_heads * head_dim * size);
  for (const LayerWeights& layer : layers_) {
    grow(activated_, std::max(tokens, wanted) * layer.up.weight->rows() * size);
  }
}

void Decoder::forward(Attention& attention, const Plan& plan, const StepInput& input,
                      const AfterLayer& after_layer) {
  const int64_t tokens = static_cast<int64_t>(plan.slots().size());
  const int64_t products = tokens * config_.hidden * config_.hidden * num_layers();
  const int threads = products < kProductsAlone ? 1 : plan.max_threads();
  reserve(tokens, input.num_wanted, threads);
  std::exception_ptr failure;
  std::optional<Team> started;  // of the threads that OpenMP grants, which may be fewer
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    started.emplace(omp_get_num_threads(), profile_);
    Team& team = *started;
    embed(input, tokens, team);
    for (int64_t layer = 0; layer < num_layers() && !failure; ++layer) {
      attend(attention, plan, layer, input, team);
      if (after_layer) {
#pragma omp master
        try {
          after_layer(layer, attended());
        } catch (...) {
          failure = std::current_exception();
        }
        team.barrier().wait();
      }
      if (layer + 1 < num_layers()) {
        feed_forward(layers_[layer], residual_.data(), attended_.data(), tokens, team);
      }
    }
    if (!failure) predict(input, team);
  }
  if (failure) std::rethrow_exception(failure);
}

void Decoder::embed(const StepInput& input, int64_t tokens, Team& team) {
#pragma omp for schedule(static) nowait
  for (int64_t token = 0; token < tokens; ++token) {
    rows_.widen(input.embedded.data + token * input.embedded.stride * size_of(dtype()),
                config_.hidden, residual_.data() + token * config_.hidden);
  }
  team.meet(Phase::kEmbedding);
}

void Decoder::attend(Attention& attention, const Plan& plan, int64_t layer,
                     const StepInput& input, Team& team) {
  const LayerWeights& weights = layers_[layer];
  const int64_t tokens = static_cast<int64_t>(plan.slots().size());
  const int64_t width = heads() * config_.head_dim;
  const PackedMatrix* const qkv[] = {weights.qkv.weight.get()};
  const Rows normed = normalise(weights.input_norm, residual_.data(), tokens, team);
  multiply(linear_, qkv, normed, tokens,
           [&](int64_t panel, int64_t first, int rows, float* const(&sums)[1]) {
             const int64_t wanted = wanted_of(*qkv[0], panel);
             add_bias(weights.qkv, panel, rows, sums[0]);
             for (int m = 0; m < rows; ++m) {
               std::copy_n(sums[0] + m * kPanel, wanted,
                           projected_.data() + (first + m) * width + panel * kPanel);
             }
           });
  team.meet(Phase::kQkv);
  const Attended heads = attended();
#pragma omp for schedule(static) nowait
  for (int64_t token = 0; token < tokens; ++token) {
    prepare_heads(weights, input, token);
    attention.write(plan, layer, token, heads.k, heads.v);
  }
  team.meet(Phase::kWrite);
  attention.attend(plan, layer, heads.q, heads.out, team.barrier());
  team.meet(Phase::kAttention);
}

void Decoder::feed_forward(const LayerWeights& weights, float* residual, std::byte* attended,
                           int64_t tokens, Team& team) {
  const int64_t size = size_of(dtype()), inner = weights.up.weight->rows();
  add(weights.output, {attended, config_.num_heads * config_.head_dim}, residual, tokens,
      Phase::kOutput, team);
  const PackedMatrix* const gate_up[] = {weights.gate.weight.get(), weights.up.weight.get()};
  const Rows normed = normalise(weights.post_norm, residual, tokens, team);
  multiply(linear_, gate_up, normed, tokens,
           [&](int64_t panel, int64_t first, int rows, float* const(&sums)[2]) {
             add_bias(weights.gate, panel, rows, sums[0]);
             add_bias(weights.up, panel, rows, sums[1]);
             const int64_t wanted = wanted_of(*gate_up[0], panel);
             for (int m = 0; m < rows; ++m) {
               rows_.silu_mul(sums[0] + m * kPanel, sums[1] + m * kPanel, wanted,
                              activated_.data() + ((first + m) * inner + panel * kPanel) * size);
             }
           });
  team.meet(Phase::kGateUp);
  add(weights.down, {activated_.data(), inner}, residual, tokens, Phase::kDown, team);
}

// After the last attention only the wanted tokens go on.
void Decoder::predict(const StepInput& input, Team& team) {
  const int64_t hidden = config_.hidden, width = config_.num_heads * config_.head_dim;
  const int64_t attended_bytes = width * size_of(dtype());
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < input.num_wanted; ++i) {
    std::copy_n(residual_.data() + input.wanted[i] * hidden, hidden,
                wanted_residual_.data() + i * hidden);
    std::copy_n(attended_.data() + input.wanted[i] * attended_bytes, attended_bytes,
                wanted_attended_.data() + i * attended_bytes);
  }
  team.barrier().wait();
  feed_forward(layers_.back(), wanted_residual_.data(), wanted_attended_.data(), input.num_wanted,
               team);
  const PackedMatrix* const head[] = {head_.get()};
  const Rows normed = normalise(norm_, wanted_residual_.data(), input.num_wanted, team);
  multiply(linear_, head, normed, input.num_wanted,
           [&](int64_t panel, int64_t first, int rows, float* const(&sums)[1]) {
             const int64_t wanted = wanted_of(*head_, panel);
             for (int m = 0; m < rows; ++m) {
               const float* logits = sums[0] + m * kPanel;
               std::copy_n(logits, wanted,
                           input.logits + (first + m) * vocabulary() + panel * kPanel);
               if (!input.best) continue;
               largest_[(first + m) * head_->panels() + panel] = rows_.largest(logits, wanted);
             }
           });
  team.meet(Phase::kHead);
  if (!input.best) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < input.num_wanted; ++i) {
    input.best[i] = best_of(i, input.logits + i * vocabulary());
  }
}

// Found in the panel that has the largest: the logits have left the caches since.
int64_t Decoder::best_of(int64_t wanted, const float* logits) const {
  const auto first = largest_.begin() + wanted * head_->panels();
  const auto most = std::max_element(first, first + head_->panels());
  int64_t at = (most - first) * kPanel;
  while (rows_.largest(logits + at, 1) != *most) ++at;
  return at;
}

void Decoder::prepare_heads(const LayerWeights& weights, const StepInput& input, int64_t token) {
  const int64_t head_dim = config_.head_dim, half = head_dim / 2, size = size_of(dtype());
  const int64_t rotated = config_.num_heads + config_.num_kv_heads;
  const float* cos = input.cos + token * half;
  const float* sin = input.sin + token * half;
  for (int64_t head = 0; head < heads(); ++head) {
    const int64_t at = (token * heads() + head) * head_dim;
    float* x = projected_.data() + at;
    std::byte* out = rotated_.data() + at * size;
    if (head >= rotated) {
      rows_.round(x, head_dim, out);
      continue;
    }
    const std::vector<float>& norm =
        head < config_.num_heads ? weights.query_norm : weights.key_norm;
    if (!norm.empty()) float_rows_.rms_norm(x, norm.data(), head_dim, config_.epsilon, x);
    rows_.rotate(x, cos, sin, half, out);
  }
}

Rows Decoder::normalise(const std::vector<float>& weight, const float* residual, int64_t count,
                        Team& team) {
  const int64_t hidden = config_.hidden, row_bytes = hidden * size_of(dtype());
  const auto row = [&](std::byte* out, int64_t i) {
    rows_.rms_norm(residual + i * hidden, weight.data(), hidden, config_.epsilon,
                   out + i * row_bytes);
  };
  if (count <= kOwnRows) {
    std::byte* own = normed_.data() + omp_get_thread_num() * kOwnRows * row_bytes;
    for (int64_t i = 0; i < count; ++i) row(own, i);
    return {own, hidden};
  }
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < count; ++i) row(normed_.data(), i);
  team.barrier().wait();
  return {normed_.data(), hidden};
}

void Decoder::add(const Projection& projection, Rows x, float* residual, int64_t tokens,
                  Phase phase, Team& team) {
  const PackedMatrix* const weight[] = {projection.weight.get()};
  multiply(linear_, weight, x, tokens,
           [&](int64_t panel, int64_t first, int rows, float* const(&sums)[1]) {
             const int64_t wanted = wanted_of(*weight[0], panel);
             add_bias(projection, panel, rows, sums[0]);
             for (int m = 0; m < rows; ++m) {
               float* to = residual + (first + m) * config_.hidden + panel * kPanel;
               for (int64_t n = 0; n < wanted; ++n) to[n] += sums[0][m * kPanel + n];
             }
           });
  team.meet(phase);
}

Attended Decoder::attended() const {
  const int64_t head_dim = config_.head_dim, stride = heads() * head_dim, size = size_of(dtype());
  std::byte* rotated = const_cast<std::byte*>(rotated_.data());
  const auto from = [&](int64_t head) {
    return Tokens{rotated + head * head_dim * size, stride, head_dim};
  };
  return {from(0), from(config_.num_heads), from(config_.num_heads + config_.num_kv_heads),
          Tokens{const_cast<std::byte*>(attended_.data()), config_.num_heads * head_dim, head_dim}};
}

}  // namespace pagedkv
