// Memory that begins with a line of the processor's cache: a load of a whole register that crosses lines takes twice as
// long, and the matrix unit loads and stores nothing else.
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
