// Rounds weights to four bits in groups.
#pragma once

#include "grouped.h"

namespace inflight {

// Panels (grouped.h) from a weight `[out, in]`, float32, bfloat16 or float16. The layout has four bits, no fine scales, and
// coarse ones in float16; its middle is 8 where there are no minima.
//
// Of some scales for a group the one with the least squared error is taken. The first reaches the group's largest weight
// (or, with minima, both ends of it); the others cut that off, and are finer for all else.
Tensor round_grouped(Sizes layout, const Tensor& weight);

}  // namespace inflight
