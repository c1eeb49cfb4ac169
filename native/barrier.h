// Where the threads of a parallel region meet.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedkv {

// A decoder's threads meet some two hundred times a step. OpenMP's own barrier waits actively for
// milliseconds unless the environment says otherwise, which on a busy machine keeps the core from
// the very thread that is waited for. This one soon lets go of it.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  // Returns when all threads have called it; what they wrote before is seen after.
  void wait() {
    if (threads_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int i = 0; i < kSpins; ++i) {
      if (round_.load(std::memory_order_acquire) != round) return;
      pause();
    }
    while (round_.load(std::memory_order_acquire) == round) round_.wait(round);
  }

 private:
  static constexpr int kSpins = 4000;  // some tens of microseconds: longer than threads differ

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }

  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace pagedkv
