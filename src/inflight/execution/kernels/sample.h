// A random token of each row of logits.
#pragma once

#include <ATen/core/Tensor.h>

namespace inflight {

// Tokens `[R]` int64 from logits `[R, V]`: divided by the temperature, filtered by top-k (0: all), top-p and min-p in
// this order, ties with the least likely token kept; then the inverse of the cumulative distribution in order of
// tokens, at `uniform` in [0, 1). All parameters are `[R]`, float32 but for top_k, int64; temperatures are above 0.
at::Tensor sample(const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_k,
                  const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& uniform);

}  // namespace inflight
