// Linear layers with grouped quantized weights (grouped.h).
#pragma once

#include "linear.h"

namespace inflight {

// `[…, in]` to `output` `[…, out]`, float32 or bfloat16, in one of two arithmetics. Exact: weights are expanded to the
// activations' dtype, as in `grouped_rows`, and computed as in a plain layer. Fast: the activations of each 32 inputs
// are rounded to int8 with their own scale; sums within a chunk are integers, sums of chunks float32. Without the
// instructions, and for 8-bit floats, it is the exact one.
void run_grouped(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output);

// The two arithmetics.
void run_exact(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output);
void run_int8(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output);

// Whether this CPU supports the fast one, and whether it is faster.
bool supports_int8_activations();
bool prefers_int8_activations();

}  // namespace inflight
