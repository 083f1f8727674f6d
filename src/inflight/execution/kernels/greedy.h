// The best token of each row of logits.
#pragma once

#include <ATen/core/Tensor.h>

namespace inflight {

// The first token with the greatest logit of each row of `[R, V]`; -1 if that is not finite or there is a NaN.
at::Tensor greedy(const at::Tensor& logits);

}  // namespace inflight
