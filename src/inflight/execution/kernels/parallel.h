// Parallel work on our threads or torch's. The assignment changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.h"

namespace inflight {

constexpr int64_t kRangesOfThread = 4;  // a preempted thread then delays the others less

// Calls function(item) once for each item.
template <class Function>
void for_each_item(int64_t num_items, const Function& function) {
  run_items(num_items, thread_count(), function);
}

// Calls function(begin, end) for ranges that together are [0, size), of at least `least` numbers, if there are as many.
template <class Function>
void for_each_range(int64_t size, int64_t least, const Function& function) {
  const int64_t num_threads = thread_count(), most = num_threads > 1 ? kRangesOfThread * num_threads : 1;
  const int64_t num_ranges = std::min(most, std::max<int64_t>(1, size / std::max<int64_t>(1, least)));
  if (size > 0)
    for_each_item(num_ranges, [&](int64_t i) { function(size * i / num_ranges, size * (i + 1) / num_ranges); });
}

}  // namespace inflight
