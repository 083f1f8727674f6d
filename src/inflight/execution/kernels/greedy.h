// The best token of each row of logits.
#pragma once

#include "tensor.h"

namespace inflight {

// The first token with the greatest logit of each row of `[R, V]`; -1 if that is not finite or there is a NaN.
Tensor greedy(const Tensor& logits);

}  // namespace inflight
