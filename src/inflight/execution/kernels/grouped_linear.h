// Layers whose weights are numbers of a few bits in groups (grouped.h).
#pragma once

#include "linear.h"

namespace inflight {

// `[…, in]` to `output` `[…, out]`, float32 or bfloat16, in one of two arithmetics.
//
// Exact: weights take the activations' dtype, as `grouped_rows` gives them, and everything is as in a layer of that dtype.
//
// Fast: the activations of 32 inputs are rounded to int8 with a scale of their own; sums within a chunk are whole numbers,
// and sums of chunks float32. Without the instructions for it, and for floats of eight bits, this is the exact one.
void run_grouped(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output);

// The two.
void run_exact(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output);
void run_int8(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output);

// Whether this CPU has the instructions for the second one, and whether it is faster with it.
bool supports_int8_activations();
bool prefers_int8_activations();

}  // namespace inflight
