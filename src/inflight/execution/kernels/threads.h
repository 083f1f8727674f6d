// The threads that compute.
//
// Torch's (OpenMP's) wait for each other at the end of each piece of work, also for those that came too late to do any of
// it: where another process has a core, all wait until it is given back. No thread of ours waits for one that has not
// begun something; the others do it. But both kinds look for work for a while before they sleep, each on cores that the
// other wants. So ours serve steps in which torch's have nothing to do.
#pragma once

#include <cstdint>
#include <utility>

#include "tensor.h"

namespace inflight {

// A function of a caller's, which outlives the call that it is given to.
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

// Of those that compute.
int64_t thread_count();

// For a thread that spins: leaves the core's other thread more of it meanwhile.
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

// How many threads of ours run what this thread calls from now on; 0: torch's do.
void use_own_threads(int64_t number);
bool uses_own_threads();

// Calls `work(item)` once for each item, on this thread and on `num_threads - 1` others, whichever are free; these are kept
// until a call names another number. Runs all items here if that would be work within work, or if another caller has the
// other threads. Throws the first exception of an item, when all have ended.
void run_items(int64_t num_items, int64_t num_threads, FunctionRef<void(int64_t)> work);

// Calls `work()` here, and meanwhile `help(number)`, on threads that are free, with numbers from 0 to `num_threads - 2`.
void run_helped(int64_t num_threads, FunctionRef<void()> work, FunctionRef<void(int64_t)> help);

}  // namespace inflight
