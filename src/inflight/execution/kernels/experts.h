// A mixture of experts: each runs on the tokens that have chosen it.
#pragma once

#include <memory>
#include <vector>

#include "linear.h"

namespace inflight {

// The projections of one expert.
struct Expert {
  std::shared_ptr<Linear> up, down;
};

// Of tokens `[T, hidden]` and the numbers of the experts that each has chosen, `[T, K]` int64: what the first projection
// of each choice's expert gives, `[T * K, out]`, sorted by expert. At the end, 0 for experts that there are not.
Tensor project_up(const Tensor& x, const Tensor& chosen, const std::vector<Expert>& experts);

// From rows `[T * K, in]` in that order what the second projection gives, `[T * K, hidden]`, in the order of the choices.
Tensor project_down(const Tensor& rows, const Tensor& chosen, const std::vector<Expert>& experts);

// Both, and between them the usual gate: the activation of the first half of a row times the other half.
Tensor run_experts(const Tensor& x, const Tensor& chosen, const std::vector<Expert>& experts,
                       Activation activation);

// Of rows of choices `[T * K, hidden]` and the choices' weights `[T, K]`, float32 or bfloat16, each token's weighted sum
// `[T, hidden]`, in the dtype of the rows. Choices are added up in their order, in float32, and rounded once.
Tensor weighted_sum(const Tensor& rows, const Tensor& weights);

}  // namespace inflight
