// What operators ask of a tensor before they touch its memory, whatever Python got wrong.
#pragma once

#include <ATen/core/Tensor.h>

namespace inflight {

// A tensor of `dims` dimensions in the CPU's memory. It may have any strides.
inline void check_strided(const at::Tensor& tensor, const char* name, int64_t dims) {
  TORCH_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided, name,
              " must be a dense tensor on the CPU");
  TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions, not ", tensor.dim());
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), name, " must not be a lazy view");
}

// The same, of `dtype`, and without gaps.
inline void check_whole(const at::Tensor& tensor, const char* name, int64_t dims, at::ScalarType dtype) {
  check_strided(tensor, name, dims);
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " must be ", dtype, ", not ", tensor.scalar_type());
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_size(const at::Tensor& tensor, const char* name, int64_t dim, int64_t size) {
  TORCH_CHECK(tensor.size(dim) == size, name, " has size ", tensor.size(dim), " in dimension ", dim, ", not ", size);
}

// Rows of numbers that the kernels compute with: `[rows, size]`, with at least one number in a row.
inline void check_rows(const at::Tensor& rows, const char* name) {
  check_strided(rows, name, 2);
  TORCH_CHECK(rows.size(1) > 0, name, " must not have empty rows");
  TORCH_CHECK(rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kBFloat16, name,
              " must be float32 or bfloat16");
}

}  // namespace inflight
