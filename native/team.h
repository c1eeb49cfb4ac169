// What the threads of a step have in common: where they meet, and a clock of what they did between.
#pragma once

#include <array>
#include <chrono>

#include <omp.h>

#include "barrier.h"

namespace pagedkv {

// The parts of a forward pass, in order.
enum class Phase { kEmbedding, kQkv, kWrite, kAttention, kOutput, kGateUp, kDown, kHead };
constexpr int kPhases = 8;
constexpr std::array<const char*, kPhases> kPhaseNames = {
    "embedding",         "norm, QKV",    "rotation, write", "attention",
    "output projection", "norm, gate, up, SiLU", "down projection", "norm, head"};

using Profile = std::array<double, kPhases>;  // seconds

class Team {
 public:
  Team(int threads, Profile& profile) : barrier_(threads), profile_(profile) {}

  Barrier& barrier() { return barrier_; }
  // All threads have done their part of the phase.
  void meet(Phase phase) {
    barrier_.wait();
    if (omp_get_thread_num() != 0) return;
    const auto now = Clock::now();
    profile_[static_cast<int>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;

  Barrier barrier_;
  Profile& profile_;
  Clock::time_point last_ = Clock::now();  // the first thread's alone
};

}  // namespace pagedkv
