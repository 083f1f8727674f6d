// Rows of activations times a panel, in registers.
#pragma once


#include <array>
#include <utility>

#include "linear.h"
#include "panels.h"
#include "stored.h"

namespace inflight {

// The product's types by dtype: rows are `Input`, and unpacked weights are laid out as in a panel of `Unpacked`.
struct Float32Rows : Float32 {
  using Input = float;
  using Sum = Floats;
  using Value = float;
  using Unpacked = Float32Rows;
  static Operand operand(const Input* from) { return *from; }
  static Floats rounded(Floats values) { return values; }
};

struct FloatsOfBFloat16Rows : Float32Rows {
  static Floats rounded(Floats values) { return (Floats)(bfloat16_of(values) << 16); }
};

struct BFloat16Rows : BFloat16 {
  using Sum = Floats;
  using Value = bfloat16;
#ifdef __AVX512BF16__
  using Input = uint16_t;
  using Unpacked = BFloat16Rows;
  static Operand operand(const Input* from) { return load<Operand>(from); }
#else
  using Input = float;
  using Unpacked = FloatsOfBFloat16Rows;
  static Operand operand(const Input* from) { return {from[0], from[1]}; }
#endif
};

// Rows `[…, in]` as `Input`, with zeros up to `num_inputs` each.
template <class Kind>
inline Tensor padded_rows(const Tensor& x, int64_t num_inputs) {
  constexpr bool kIsWidened = sizeof(typename Kind::Input) != sizeof(typename Kind::Value);
  return padded_rows(x, num_inputs, kIsWidened ? kFloat : x.scalar_type());
}

#ifdef __AVX512F__
constexpr int kRowsAtOnce = 8;  // 16 sums, of 32 registers
#else
constexpr int kRowsAtOnce = 3;  // 12 sums, of 16 registers
#endif

constexpr int64_t kStepsAtOnce = 4;  // unrolled: GCC would copy the sums between iterations

// Adds to sums[row][vector] the products of `steps` operands, for kRows rows that lie `stride` elements apart, and some
// vectors of a panel's outputs, from `panel` on. `next` advances once for kStepsAtOnce operands.
template <class Kind, int kRows, int kCount, class Weight>
inline void multiply_panel(const typename Kind::Input* x, int64_t stride, const Weight* panel, int64_t steps,
                           typename Kind::Sum (&sums)[kRows][kCount], NextPanel next = {}) {
  constexpr int64_t kPack = Kind::kPack;
  const auto add = [&](int64_t step) __attribute__((always_inline)) {
    typename Kind::Panel weights[kCount];
    for (int v = 0; v < kCount; ++v) {
      weights[v] = Kind::load_panel(panel + (step * kPanelOutputs + v * kLanes) * kPack);
      if (kRows > kCount) keep_in_register(weights[v]);
    }
    for (int row = 0; row < kRows; ++row) {
      const auto operand = Kind::operand(x + row * stride + step * kPack);
      for (int v = 0; v < kCount; ++v) sums[row][v] = Kind::multiply_add(sums[row][v], operand, weights[v]);
    }
  };
  int64_t step = 0;
  for (; step + kStepsAtOnce <= steps; step += kStepsAtOnce) {
    next.advance();
    for (int64_t i = 0; i < kStepsAtOnce; ++i) add(step + i);
  }
  for (; step < steps; ++step) add(step);
}

// Rows one after the other.
template <class Kind>
struct RowsInTurn {
  const typename Kind::Input* x;
  int64_t stride;

  RowsInTurn(const typename Kind::Input* x, int64_t, int64_t num_operands) : x(x), stride(num_operands * Kind::kPack) {}
  const typename Kind::Input* at(int64_t row, int64_t operand) const { return x + row * stride + operand * Kind::kPack; }
};

// Sums of rows with a panel in parts: each part stays in the L1 cache while all rows use it.
template <class Kind>
struct RowSums {
  static constexpr int64_t kMaxRows = 64, kRowsHeld = 0;
  using Rows = RowsInTurn<Kind>;
  float sums[kMaxRows][kPanelOutputs];

  void clear(int64_t num_rows) { std::memset(sums, 0, num_rows * sizeof sums[0]); }
  void settle() {}

  // Adds the products of rows from `first_row` on with `steps` operands from `first_step` on, prefetching `next_bytes`
  // at `next`.
  void add(const Rows& rows, int64_t first_row, int64_t num_rows, int64_t first_step, const typename Kind::Stored* part,
           int64_t steps, const void* next = nullptr, int64_t next_bytes = 0) {
    constexpr auto by_rows = functions(std::make_integer_sequence<int, kRowsTogether>{});
    for_each_group(num_rows, kRowsTogether, [&](const RowGroup& group) {
      NextPanel ahead;
      if (steps >= kStepsAtOnce) ahead = {next, next_bytes, steps / kStepsAtOnce, group};
      by_rows[group.count - 1](rows.at(first_row + group.first, first_step), rows.stride, part, steps,
                               sums + group.first, ahead);
    });
  }

 private:
#ifdef __AVX512F__
  static constexpr int kRowsTogether = kRowsAtOnce, kVectorsTogether = kVectors;
#else
  static constexpr int kRowsTogether = 6, kVectorsTogether = 2;  // for which registers suffice
#endif

  template <int kRows>
  static void add_rows(const typename Kind::Input* x, int64_t stride, const typename Kind::Stored* part, int64_t steps,
                       float (*sums)[kPanelOutputs], NextPanel ahead) {
    for (int first = 0; first < kPanelOutputs; first += kVectorsTogether * kLanes) {
      Floats own[kRows][kVectorsTogether];
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < kVectorsTogether; ++v) own[row][v] = load<Floats>(&sums[row][first + v * kLanes]);
      multiply_panel<Kind, kRows>(x, stride, part + first * Kind::kPack, steps, own, ahead);
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < kVectorsTogether; ++v) store(&sums[row][first + v * kLanes], own[row][v]);
      ahead = {};
    }
  }

  template <int... kRows>
  static constexpr auto functions(std::integer_sequence<int, kRows...>) {
    return std::array{&add_rows<kRows + 1>...};
  }
};

}  // namespace inflight
