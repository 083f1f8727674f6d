// Memory for the values of a program, reused within and across steps: fresh memory costs more than most of what is
// written into it.
#pragma once

#include <array>
#include <bit>
#include <vector>

#include "tensor.h"

namespace inflight {

class ReusedMemory {
 public:
  // Memory for `num_elements`: a power of two of bytes.
  Memory take(int64_t num_elements, ScalarType dtype) {
    const int64_t num_bytes = num_elements * size_of(dtype);
    const size_t kind = std::bit_width(uint64_t(std::max(num_bytes, kMinBytes) - 1));
    auto& free = free_.at(kind);
    if (free.empty()) {
      free.push_back(empty({int64_t(1) << kind}, kByte).memory());
      free.back().add_flags(kInflightIsReused);
    }
    Memory taken = std::move(free.back());
    free.pop_back();
    taken.set_type(dtype);
    return taken;
  }

  // Takes back memory from `take`, unless it is shared.
  void take_back(Memory&& memory) {
    const uint64_t num_bytes = uint64_t(memory.num_bytes());
    if ((memory.raw().flags & kInflightIsReused) && !memory.is_shared())
      free_.at(std::countr_zero(num_bytes)).push_back(std::move(memory));
    else
      memory.reset();
  }

 private:
  static constexpr int64_t kMinBytes = 64;
  std::array<std::vector<Memory>, 48> free_;  // by the power of two
};

}  // namespace inflight
