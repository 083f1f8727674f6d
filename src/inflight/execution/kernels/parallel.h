// Work for all of torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace inflight {

// Calls function(item) once for each item, on whichever thread is free. Which thread that is changes no bit.
template <class Function>
void for_each_item(int64_t num_items, const Function& function) {
  std::atomic<int64_t> next{0};
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_items);
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread)
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) function(item);
  });
}

}  // namespace inflight
