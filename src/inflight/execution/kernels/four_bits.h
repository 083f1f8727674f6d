// Layers whose weights are whole numbers of four bits in groups of inputs that share a scale.
#pragma once

#include "linear.h"

namespace inflight {

// Refuses panels that do not fit the layer's sizes. They are `[out / 32, in / group, 16 * group + 64]` uint8, both
// quotients rounded up. Of a group of 32, 64 or 128 inputs and 32 outputs first come the weights, for eight inputs after
// the other and each time for every output: four bytes, with the first four inputs in their low halves and the others in
// their high halves. Then come the outputs' scales in float16. A weight is `(number - 8) * scale`.
void check_four_bits(const Linear& linear);

// `[…, in]` to `output` `[…, out]`, float32 or bfloat16. The activations of a group are rounded to int8 with a scale of
// their own; sums within a group are whole numbers, and sums of groups float32.
void run_four_bits(const Linear& linear, const at::Tensor& x, at::Tensor& output);

}  // namespace inflight
