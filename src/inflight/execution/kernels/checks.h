// Checks of tensors before operators touch their memory.
#pragma once

#include "tensor.h"

namespace inflight {

// A tensor of `dims` dimensions in the CPU's memory. It may have any strides.
inline void check_strided(const Tensor& tensor, const char* name, int64_t dims) {
  CHECK(tensor.defined() && tensor.memory().is_dense(), name, " must be a dense tensor on the CPU");
  CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions, not ", tensor.dim());
  CHECK(!tensor.memory().is_lazy(), name, " must not be a lazy view");
}

// The same, of `dtype`, and without gaps.
inline void check_whole(const Tensor& tensor, const char* name, int64_t dims, ScalarType dtype) {
  check_strided(tensor, name, dims);
  CHECK(tensor.scalar_type() == dtype, name, " must be ", dtype, ", not ", tensor.scalar_type());
  CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_size(const Tensor& tensor, const char* name, int64_t dim, int64_t size) {
  CHECK(tensor.size(dim) == size, name, " has size ", tensor.size(dim), " in dimension ", dim, ", not ", size);
}

// Rows of numbers that the kernels compute with: `[rows, size]`, with at least one number in a row.
inline void check_rows(const Tensor& rows, const char* name) {
  check_strided(rows, name, 2);
  CHECK(rows.size(1) > 0, name, " must not have empty rows");
  CHECK(rows.scalar_type() == kFloat || rows.scalar_type() == kBFloat16, name,
              " must be float32 or bfloat16");
}

// Calls `run` with a value of the dtype of a tensor, float32 or bfloat16.
template <class Run>
void with_dtype(const Tensor& tensor, const Run& run) {
  if (tensor.scalar_type() == kFloat) return run(float());
  CHECK(tensor.scalar_type() == kBFloat16, "rows cannot be ", tensor.scalar_type());
  run(bfloat16());
}

}  // namespace inflight
