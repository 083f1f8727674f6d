// Adapters (LoRA; Hu et al., 2021): what some rows of a step add to what a layer gives, each by matrices of its own.
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

// Which adapter each row of a step has: a number among `adapters`, or -1. Layers that give logits have rows of their own.
// Some layers get a few rows more, copies of the last one.
struct AdaptedStep {
  static constexpr int64_t kMostCopies = 64;

  std::vector<std::shared_ptr<const Adapter>> adapters;  // none: no row has any
  std::vector<int32_t> of_tokens, of_logits;             // and of so many copies
};

// Where a layer finds what its rows add.
struct AdapterPlace {
  std::shared_ptr<const AdaptedStep> step;
  int64_t number;
  bool reads_logit_rows;

  // Of each row, as in `AdaptedStep`; null: none has any.
  const int32_t* of_rows(int64_t num_rows) const;
};

// What rows add to the sums of a layer: for each row `out` floats, or null. A row's depend on nothing but its adapter and
// itself. They are this thread's until the next object is made.
class Additions {
 public:
  Additions(const Linear& linear, const Tensor& x, const int32_t* adapter_of_row);

  // By row; null: no row adds anything.
  const float* const* rows() const { return rows_.empty() ? nullptr : rows_.data(); }

 private:
  std::vector<const float*> rows_;
};

// Refuses an adapter that no layer could read.
void check(const Adapter& adapter);

// Rows `[T, hidden]` of an embedding, and what is added to those of tokens that have an adapter.
Tensor adapted_rows(const Tensor& rows, const Tensor& ids, const AdapterPlace& place);

}  // namespace inflight
