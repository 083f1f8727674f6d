// Memory aligned to cache lines: full-register loads across lines take twice as long, and the matrix unit requires
// alignment.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace inflight {

template <class Value>
struct LineAllocator {
  using value_type = Value;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class Other>
  LineAllocator(const LineAllocator<Other>&) {}

  Value* allocate(std::size_t size) { return static_cast<Value*>(::operator new(size * sizeof(Value), kLine)); }
  void deallocate(Value* values, std::size_t) { ::operator delete(values, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};

template <class Value>
using AlignedVector = std::vector<Value, LineAllocator<Value>>;

}  // namespace inflight
