// A linear layer whose weight oneDNN has packed, in float32, bfloat16 or int8.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace inflight {

// Of int8: `scales` is [out] float32, a scale for each output channel.
struct Linear {
  at::Tensor packed;
  std::optional<at::Tensor> bias, scales, zero_points;
  std::string activation;
  std::optional<std::string> variant;
};

// `[…, in]` to `[…, out]`. Activations of int8 layers are quantised row by row, with a scale each: rows stay strangers.
at::Tensor apply(const Linear& linear, const at::Tensor& x, int64_t out_features);

}  // namespace inflight
