// Encoder outputs in place of a step's input embeddings.
#pragma once

#include <memory>

#include "current.h"
#include "tensor.h"

namespace inflight {

// `[n, hidden]`, and `[n]` int64: the embeddings that they replace.
struct PlacedRows {
  Tensor rows, places;
};

// The rows of the next `place_rows`; undefined: none.
void put_rows(Current<PlacedRows>& placing, const Tensor& rows, const Tensor& places);

// Writes these rows into `[T, hidden]` of their dtype, once.
void place_rows(const Tensor& embeddings, Current<PlacedRows>& placing);

}  // namespace inflight
