// Memory for the values of a program. What nothing needs any more serves again, in this step or in the next: new memory
// of the system's costs more than most of what is written into it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <bit>
#include <vector>

namespace inflight {

class ReusedMemory {
 public:
  // A tensor in memory of a power of two of bytes.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
    const int64_t num_bytes = c10::multiply_integers(sizes) * int64_t(c10::elementSize(dtype));
    const size_t kind = std::bit_width(uint64_t(std::max(num_bytes, kMinBytes) - 1));
    auto& free = free_.at(kind);
    if (free.empty()) free.push_back(at::empty({int64_t(1) << kind}, at::kByte).storage());
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(free.back()), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
    free.pop_back();
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return tensor;
  }

  // Takes the memory of a tensor from `empty`, unless something else is in it, too.
  void take_back(at::Tensor&& tensor) {
    at::Storage storage = tensor.storage();
    tensor.reset();
    if (storage.use_count() == 1 && std::has_single_bit(storage.nbytes()))
      free_.at(std::countr_zero(storage.nbytes())).push_back(std::move(storage));
  }

 private:
  static constexpr int64_t kMinBytes = 64;
  std::array<std::vector<at::Storage>, 48> free_;  // by the power of two
};

}  // namespace inflight
