// The compute threads. Torch's (OpenMP's) threads wait for each other at the end of each parallel region, even for
// threads that did no work: if another process has a core, all wait for it. Our threads never wait for one that has not
// begun an item; the others do its work. But both kinds spin before they sleep, on cores that the other needs. So ours
// serve steps in which torch's have nothing to do.
#pragma once

#include <cstdint>
#include <utility>

#include "tensor.h"

namespace inflight {

// A reference to a caller's function, which outlives the call.
template <class Signature>
class FunctionRef;

template <class... Arguments>
class FunctionRef<void(Arguments...)> {
 public:
  template <class Function>
  FunctionRef(const Function& function)  // NOLINT: as std::function
      : function_(&function),
        call_([](const void* own, Arguments... arguments) { (*static_cast<const Function*>(own))(arguments...); }) {}
  void operator()(Arguments... arguments) const { call_(function_, arguments...); }

 private:
  const void* function_;
  void (*call_)(const void*, Arguments...);
};

// Number of compute threads.
int64_t thread_count();

// For spinning: yields to the core's sibling thread.
inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// While there is one, torch's profiler sees an event of this name. (A literal: it is not copied.)
class Range {
 public:
  explicit Range(const char* name) : range_(torch->begin_range(name)) {}
  ~Range() {
    if (range_) torch->end_range(range_);
  }
  Range(const Range&) = delete;

 private:
  void* range_;
};

// The number of our threads for this thread's next calls; 0: torch's threads.
void use_own_threads(int64_t number);
bool uses_own_threads();

// Calls `work(item)` once for each item, on this thread and on up to `num_threads - 1` free ones, which persist until a
// call names another number. Runs all items here if nested, or if another caller has the threads. Throws the first
// exception of an item, after all have ended.
void run_items(int64_t num_items, int64_t num_threads, FunctionRef<void(int64_t)> work);

// Calls `work()` here, and meanwhile `help(number)` on free threads, with numbers from 0 to `num_threads - 2`.
void run_helped(int64_t num_threads, FunctionRef<void()> work, FunctionRef<void(int64_t)> help);

}  // namespace inflight
