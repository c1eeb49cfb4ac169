// A decoder's forward pass, all layers of it, by one team of threads.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace pagedkv {

// y = x W^T + b. The bias, empty for none, is padded to whole panels.
struct Projection {
  std::shared_ptr<PackedMatrix> weight;
  std::vector<float> bias;
};

struct LayerWeights {
  std::vector<float> input_norm, post_norm;  // [hidden]
  std::vector<float> query_norm, key_norm;   // [D], empty for none
  Projection qkv, output, gate, up, down;
};

// One step's batch of T tokens.
struct StepInput {
  Rows embedded;      // [T, hidden] in the weights' type
  const float* cos;   // [T, D / 2]
  const float* sin;
  const int64_t* wanted;  // tokens whose logits are wanted
  int64_t num_wanted;
  float* logits;  // [num_wanted, V]
  int64_t* best;  // [num_wanted] the first of the largest logits, NaN above all; nullptr: not wanted
};

// What attention was given and gave in a layer, in the store's type.
struct Attended {
  Tokens q, k, v, out;
};

// The residual stream, norms, rotations and activations are float32; what a matrix multiplies is
// rounded to the weights' type, once. Keeps weights and scratch, K/V live in the attention's store.
// The bits of a token's logits depend on that token and the K/V of its positions only.
class Decoder {
 public:
  struct Config {
    int64_t hidden, num_heads, num_kv_heads, head_dim;
    float epsilon;
  };
  using AfterLayer = std::function<void(int64_t layer, const Attended&)>;

  Decoder(const Config& config, std::vector<LayerWeights> layers, std::vector<float> norm,
          std::shared_ptr<PackedMatrix> head, const LinearKernels& linear, const RowKernels& rows,
          const RowKernels& float_rows);

  const Config& config() const { return config_; }
  DType dtype() const { return head_->dtype(); }
  int64_t vocabulary() const { return head_->rows(); }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }

  // Writes K/V through the plan, fills the logits. `after_layer`, if any, is called by one thread
  // while the others wait. One call at a time.
  void forward(Attention& attention, const Plan& plan, const StepInput& input,
               const AfterLayer& after_layer);
  // What the first thread's time went to, waiting for the others included, in all calls so far.
  const Profile& profile() const { return profile_; }

 private:
  void reserve(int64_t tokens, int64_t wanted, int threads);
  // Each of these is called by every thread of the team, which has met before it and meets at
  // its end.
  void embed(const StepInput& input, int64_t tokens, Team& team);
  void attend(Attention& attention, const Plan& plan, int64_t layer, const StepInput& input,
              Team& team);
  void feed_forward(const LayerWeights& weights, float* residual, std::byte* attended,
                    int64_t tokens, Team& team);
  // The normalised rows of a residual [count, hidden].
  Rows normalise(const std::vector<float>& weight, const float* residual, int64_t count,
                 Team& team);
  // residual += x W^T + b
  void add(const Projection& projection, Rows x, float* residual, int64_t tokens, Phase phase,
           Team& team);
  void predict(const StepInput& input, Team& team);
  int64_t best_of(int64_t wanted, const float* logits) const;

  void prepare_heads(const LayerWeights& weights, const StepInput& input, int64_t token);
  Attended attended() const;
  int64_t heads() const { return config_.num_heads + 2 * config_.num_kv_heads; }

  Config config_;
  std::vector<LayerWeights> layers_;
  std::vector<float> norm_;
  std::shared_ptr<PackedMatrix> head_;
  const LinearKernels& linear_;
  const RowKernels& rows_;
  const RowKernels& float_rows_;
  Profile profile_{};
  std::vector<float> residual_;       // [T, hidden]
  std::vector<float> projected_;      // [T, H + 2 G, D]: queries, keys, values
  std::vector<std::byte> rotated_;    // the same, as attention takes them
  std::vector<std::byte> attended_;   // [T, H, D]
  std::vector<float> wanted_residual_;       // [m, hidden]
  std::vector<std::byte> wanted_attended_;   // [m, H, D]
  std::vector<std::byte> normed_;     // [T, hidden]
  std::vector<std::byte> activated_;  // [T, inner]
  std::vector<int32_t> largest_;      // [m, panels of the head]: of the logits, as `order` has them
};

}  // namespace pagedkv
