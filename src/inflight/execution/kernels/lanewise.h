// Rows of activations times a panel, in registers.
#pragma once

#include "linear.h"
#include "panels.h"
#include "stored.h"

namespace inflight {

struct Float32Rows : Float32 {
  using Sum = Floats;
  using Value = float;
};

struct BFloat16Rows : BFloat16 {
  using Sum = Floats;
  using Value = at::BFloat16;
};

#ifdef __AVX512F__
constexpr int kRowsAtOnce = 8;  // 16 sums, of 32 registers
#else
constexpr int kRowsAtOnce = 3;  // 12 sums, of 16 registers
#endif

// The operand that begins here. Without the hardware's products of bfloat16 it is made of two of them.
template <class Kind>
inline typename Kind::Operand operand_at(const typename Kind::Stored* from) {
  using Operand = typename Kind::Operand;
  if constexpr (sizeof(Operand) == Kind::kPack * sizeof(*from)) return load<Operand>(from);
  else return {float_of(from[0]), float_of(from[1])};
}

constexpr int64_t kStepsAtOnce = 4;  // written out: GCC copies the sums from one turn of a loop to the next

// Adds to sums[row][vector] the products of `steps` operands, for kRows rows that lie `stride` elements apart. `next`
// advances once for kStepsAtOnce of them.
template <class Kind, int kRows, class Weight>
inline void multiply_panel(const typename Kind::Stored* x, int64_t stride, const Weight* panel, int64_t steps,
                           typename Kind::Sum (&sums)[kRows][kVectors], NextPanel next = {}) {
  constexpr int64_t kPack = Kind::kPack;
  const auto add = [&](int64_t step) __attribute__((always_inline)) {
    typename Kind::Panel weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = Kind::load_panel(panel + (step * kPanelOutputs + v * kLanes) * kPack);
    for (int row = 0; row < kRows; ++row) {
      const auto operand = operand_at<Kind>(x + row * stride + step * kPack);
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
