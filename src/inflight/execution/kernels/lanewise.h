// Rows of activations times a panel, in registers.
#pragma once

#include <ATen/ops/constant_pad_nd.h>

#include "linear.h"
#include "panels.h"
#include "stored.h"

namespace inflight {

// How rows of a dtype meet their weights; `Input` is what they are given as.
struct Float32Rows : Float32 {
  using Input = float;
  using Sum = Floats;
  using Value = float;
  static Operand operand(const Input* from) { return *from; }
};

struct BFloat16Rows : BFloat16 {
  using Sum = Floats;
  using Value = at::BFloat16;
#ifdef __AVX512BF16__
  using Input = uint16_t;
  static Operand operand(const Input* from) { return load<Operand>(from); }
#else
  using Input = float;
  static Operand operand(const Input* from) { return {from[0], from[1]}; }
#endif
};

// Rows `[…, in]` as `Input`, with zeros up to `num_inputs` each.
template <class Kind>
inline at::Tensor padded_rows(const at::Tensor& x, int64_t num_inputs) {
  const int64_t missing = num_inputs - x.size(-1);
  const at::Tensor rows = missing ? at::constant_pad_nd(x, {0, missing}) : x.contiguous();
  return sizeof(typename Kind::Input) == sizeof(typename Kind::Value) ? rows : rows.to(at::kFloat);
}

#ifdef __AVX512F__
constexpr int kRowsAtOnce = 8;  // 16 sums, of 32 registers
#else
constexpr int kRowsAtOnce = 3;  // 12 sums, of 16 registers
#endif

constexpr int64_t kStepsAtOnce = 4;  // written out: GCC copies the sums from one turn of a loop to the next

// Adds to sums[row][vector] the products of `steps` operands, for kRows rows that lie `stride` elements apart. `next`
// advances once for kStepsAtOnce of them.
template <class Kind, int kRows, class Weight>
inline void multiply_panel(const typename Kind::Input* x, int64_t stride, const Weight* panel, int64_t steps,
                           typename Kind::Sum (&sums)[kRows][kVectors], NextPanel next = {}) {
  constexpr int64_t kPack = Kind::kPack;
  const auto add = [&](int64_t step) __attribute__((always_inline)) {
    typename Kind::Panel weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = Kind::load_panel(panel + (step * kPanelOutputs + v * kLanes) * kPack);
    for (int row = 0; row < kRows; ++row) {
      const auto operand = Kind::operand(x + row * stride + step * kPack);
      for (int v = 0; v < kVectors; ++v) sums[row][v] = Kind::multiply_add(sums[row][v], operand, weights[v]);
    }
  };
  int64_t step = 0;
  for (; step + kStepsAtOnce <= steps; step += kStepsAtOnce) {
    next.advance();
    for (int64_t i = 0; i < kStepsAtOnce; ++i) add(step + i);
  }
  for (; step < steps; ++step) add(step);
}

}  // namespace inflight
