// The threads that compute.
//
// Torch's (OpenMP's) wait for each other at the end of each piece of work, also for those that came too late to do any of
// it: where another process has a core, all wait until it is given back. Nobody waits for a thread of ours that has not
// begun something; the others do it. But both kinds look for work for a while before they sleep, each on cores that the
// other wants. So ours serve steps in which torch's have nothing to do.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace inflight {

// For whoever looks again and again: leaves the core's other thread more of it meanwhile.
inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether what this thread calls from now on runs on our threads instead of torch's.
void use_own_threads(bool are_used);
bool uses_own_threads();

// Calls `work(item)` once for each item, on this thread and on `num_threads - 1` others, whoever is free; these are kept
// until a call names another number. Runs all items here if that would be work within work, or if another caller has the
// other threads. Throws the first exception of an item, when all have ended.
void run_items(int64_t num_items, int64_t num_threads, c10::function_ref<void(int64_t)> work);

// Calls `work()` here, and meanwhile `help(number)`, on threads that are free, with numbers from 0 to `num_threads - 2`.
void run_helped(int64_t num_threads, c10::function_ref<void()> work, c10::function_ref<void(int64_t)> help);

}  // namespace inflight
