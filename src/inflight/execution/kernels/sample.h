// The best token of each row of logits, or a random one.
#pragma once

#include "tensor.h"

namespace inflight {

// The first token with the greatest logit of each row of `[R, V]`; -1 if that is not finite or there is a NaN.
Tensor greedy(const Tensor& logits);

// Tokens `[R]` int64 from logits `[R, V]`: divided by the temperature, filtered by top-k (0: all), top-p and min-p in
// this order, ties with the least likely token kept; then the inverse of the cumulative distribution in order of
// tokens, at `uniform` in [0, 1). All parameters are `[R]`, float32 but for top_k, int64; temperatures are above 0.
Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                  const Tensor& top_p, const Tensor& min_p, const Tensor& uniform);

}  // namespace inflight
