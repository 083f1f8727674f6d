// A linear layer with its weight in panels: float32, bfloat16, int8, or grouped.
#pragma once

#include "tensor.h"

#include <optional>
#include <string_view>

#include "activate.h"
#include "adapters.h"
#include "grouped.h"

namespace inflight {

constexpr int kPanelOutputs = 32;

// `panels` is `[out / 32, in / pack, 32, pack]`, both rounded up and filled with zeros; pack is what the hardware
// multiplies and adds for a lane at once: 1 for float32, 2 for bfloat16, 4 for int8. For int8, `scales` is `[out]`. A
// grouped weight's panels are described in grouped.h.
struct Linear {
  Tensor panels;
  std::optional<Tensor> bias, scales;
  int64_t in_features, out_features;
  Activation activation;  // or nullptr
  Tensor offsets;     // of int8, `[out]` int32: the zero point's contribution to each sum
  std::optional<Grouped> grouped;
  bool is_exact = false;            // of a grouped weight: see grouped_linear.h
  std::optional<Tensor> order;  // of a grouped weight, `[in]` int64: the input of each column
  std::optional<AdapterPlace> adapters;

  Linear(const Tensor& panels, const std::optional<Tensor>& bias, const std::optional<Tensor>& scales,
         int64_t in_features, int64_t out_features, Activation activation);
  Linear(const Tensor& panels, const Grouped& grouped, const std::optional<Tensor>& order, bool is_exact,
         const std::optional<Tensor>& bias, int64_t in_features, int64_t out_features, Activation activation);

 private:
  void check_bias() const;
};

// Lays out a contiguous weight `[out, in]` in `panels` as above.
void pack_panels(const Tensor& weight, const Tensor& panels);

// Whether this CPU has the instructions for a dtype; without them oneDNN is better.
bool has_panels(ScalarType dtype);

// The adapter of each of `num_rows` rows; null: none.
inline const int32_t* adapters_of_rows(const Linear& linear, int64_t num_rows) {
  return linear.adapters ? linear.adapters->of_rows(num_rows) : nullptr;
}

// `[…, in]` to `[…, out]`, float32 or bfloat16. For int8 each row of activations is rounded with its own scale.
Tensor apply(const Linear& linear, const Tensor& x);

// The same, into `output` `[…, out]`, in one piece and of the dtype of `x`.
void apply_to(const Linear& linear, const Tensor& x, Tensor& output);

// The same, for rows that have these adapters instead of the step's.
void apply_to(const Linear& linear, const Tensor& x, const int32_t* adapter_of_row, Tensor& output);

}  // namespace inflight
