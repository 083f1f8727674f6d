// The best token of each row of logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace inflight {

// The greatest logit of each row of `[R, V]` as float32, and the first token that has it. NaN anywhere: NaN.
std::tuple<at::Tensor, at::Tensor> greedy(const at::Tensor& logits);

}  // namespace inflight
