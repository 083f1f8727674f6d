// Encoder outputs in place of a step's input embeddings, or added to hidden states (DeepStack).
#pragma once

#include <memory>

#include "current.h"
#include "tensor.h"

namespace inflight {

// `[n, hidden]`, and `[n]` int64: the rows that they replace, or are added to.
struct PlacedRows {
  Tensor rows, places;
  bool adds = false;
};

// The rows of the next `place_rows`; undefined: none.
void put_rows(Current<PlacedRows>& placing, const PlacedRows& placed);

// Writes these rows into `states`, `[T, hidden]` of their dtype, once.
void place_rows(const Tensor& states, Current<PlacedRows>& placing);

}  // namespace inflight
