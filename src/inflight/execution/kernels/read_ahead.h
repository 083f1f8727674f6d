// Prefetching while one thread runs something small and memory would be idle.
#pragma once

#include <algorithm>
#include <atomic>

#include "threads.h"

namespace inflight {

constexpr int64_t kReadAheadBytes = 1 << 18;  // of each thread: part of an L2 cache
constexpr int64_t kReadAheadStep = 2048;      // bytes between two checks whether to continue

// Runs `work` on the calling thread. Meanwhile the others prefetch the first bytes of `memory` into their caches.
template <class Work>
void run_reading_ahead(const char* memory, int64_t num_bytes, const Work& work) {
  struct Ending {  // even if `work` throws
    std::atomic<bool>& has_come;
    ~Ending() { has_come.store(true, std::memory_order_relaxed); }
  };
  std::atomic<bool> is_over{false};
  const auto run = [&] {
    const Ending ending{is_over};
    work();
  };
  run_helped(thread_count(), run, [&](int64_t number) {
    const int64_t first = std::min(num_bytes, number * kReadAheadBytes);
    const int64_t end = std::min(num_bytes, first + kReadAheadBytes);
    for (int64_t at = first; at < end && !is_over.load(std::memory_order_relaxed); at += kReadAheadStep)
      for (int64_t line = at; line < std::min(end, at + kReadAheadStep); line += 64)
        static_cast<void>(*const_cast<const volatile char*>(memory + line));
  });
}

}  // namespace inflight
