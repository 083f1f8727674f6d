// LoRA adapters (Hu et al., 2021): low-rank updates of a layer's outputs, chosen per row of a step.
#pragma once

#include "tensor.h"

#include <memory>
#include <vector>

#include "aligned.h"

namespace inflight {

struct Linear;

// Adds `up * (down * x)` to some outputs of a layer. `down` is `[rank, in]`, or, of an embedding, `[rows, rank]`: what each
// row of the table is in its place. Of every 8 rows of the former, 32 inputs lie together: `[rank / 8, in / 32, 8, 32]`;
// rows that are left over lie one after the other. `up` lies in panels `[out / 32, rank / pack, 32, pack]` as in linear.h, and has the
// scale in it. Both are float32 or bfloat16.
struct LowRank {
  Tensor down, up;
  int64_t first_output, num_outputs;

  int64_t rank() const { return up.size(1) * up.size(3); }
};

// The matrices of one adapter, by the places of layers. In one place there are several where layers run as one.
struct Adapter {
  std::vector<std::vector<LowRank>> places;
};

// The adapter of each row of a step: an index into `adapters`, or -1. Layers of logits have their own rows. Some layers
// get a few more rows, copies of the last one.
struct AdaptedStep {
  static constexpr int64_t kMostCopies = 64;

  std::vector<std::shared_ptr<const Adapter>> adapters;  // none: no row has one
  std::vector<int32_t> of_tokens, of_logits;             // and this many copies
};

// Where a layer finds its rows' updates.
struct AdapterPlace {
  std::shared_ptr<const AdaptedStep> step;
  int64_t number;
  bool reads_logit_rows;

  // Of each row, as in `AdaptedStep`; null: no row has one.
  const int32_t* of_rows(int64_t num_rows) const;
};

// The rows' updates of a layer's sums: `out` floats per row, or null. A row's update depends only on its adapter and
// itself. Valid in this thread until the next object is made.
class Additions {
 public:
  Additions(const Linear& linear, const Tensor& x, const int32_t* adapter_of_row);

  // By row; null: no updates.
  const float* const* rows() const { return rows_.empty() ? nullptr : rows_.data(); }

 private:
  std::vector<const float*> rows_;
};

// Refuses an adapter with an invalid layout.
void check(const Adapter& adapter);

// Rows `[T, hidden]` of an embedding, with the updates of tokens that have an adapter.
Tensor adapted_rows(const Tensor& rows, const Tensor& ids, const AdapterPlace& place);

}  // namespace inflight
