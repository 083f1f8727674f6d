// A mixture of experts: each runs on the tokens that have chosen it.
#pragma once

#include <memory>
#include <vector>

#include "linear.h"

namespace inflight {

// The projections of one expert. `up` gives the gate's outputs and then as many that are multiplied with them.
struct Expert {
  std::shared_ptr<Linear> up, down;
};

// Tokens `[T, hidden]` and the numbers of the experts that each has chosen, `[T, K]` int64 (others than there are give
// 0); returns `[T * K, hidden]`, what each choice gives.
at::Tensor run_experts(const at::Tensor& x, const at::Tensor& chosen, const std::vector<Expert>& experts,
                       Activation activation);

}  // namespace inflight
