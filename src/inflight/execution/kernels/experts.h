// A mixture of experts: each expert runs on the tokens routed to it.
#pragma once

#include <memory>
#include <vector>

#include "linear.h"

namespace inflight {

// The projections of one expert.
struct Expert {
  std::shared_ptr<Linear> up, down;
};

// The first projections for tokens `[T, hidden]` and their expert ids `[T, K]` int64: `[T * K, out]`, sorted by expert.
// Invalid experts come last, with zeros.
Tensor project_up(const Tensor& x, const Tensor& chosen, const std::vector<Expert>& experts);

// The second projections of rows `[T * K, in]` in that order: `[T * K, hidden]`, in the order of the choices.
Tensor project_down(const Tensor& rows, const Tensor& chosen, const std::vector<Expert>& experts);

// Both, and between them the usual gate: the activation of the first half of a row times the other half.
Tensor run_experts(const Tensor& x, const Tensor& chosen, const std::vector<Expert>& experts,
                       Activation activation);

// Of rows of choices `[T * K, hidden]` and the choices' weights `[T, K]`, float32 or bfloat16, each token's weighted sum
// `[T, hidden]`, in the dtype of the rows. Choices are added up in their order, in float32, and rounded once.
Tensor weighted_sum(const Tensor& rows, const Tensor& weights);

}  // namespace inflight
