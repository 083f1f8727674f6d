// GGUF's quantised tensors as they lie in files, laid out in panels.
#pragma once

#include <string_view>
#include <vector>

#include "grouped.h"

namespace inflight {

// Panels as in grouped.h of a weight `[out, in]` of a type such as "Q4_K". Its rows are rows of `blocks`, tensors
// `[n, in / block, bytes]` uint8: `rows` `[tensors, out]` int64 has their numbers in each tensor, from 1 on, and 0 where a
// row is in another tensor. The layout's coarse scales stand for a block each.
Tensor pack_blocks(std::string_view kind, Sizes layout, const std::vector<Tensor>& blocks, const Tensor& rows);

}  // namespace inflight
