// Several rows (eight with AVX-512) go through a panel together, with a register for every row and vector of outputs.
// Its weights are read once, in memory order, at memory bandwidth; further rows find it in the L2 cache. A matrix unit,
// if any, multiplies everything but float32. An output is one sum over the inputs in ascending order, on any thread and
// beside any rows.
#include "linear.h"

#include <array>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "aligned.h"
#include "checks.h"
#include "convert.h"
#include "grouped_linear.h"
#include "lanewise.h"
#include "panels.h"
#include "parallel.h"
#include "tiles.h"

namespace inflight {
namespace {

#ifdef __AVX2__
#define INFLIGHT_INT8
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr int kZeroPoint = 128;  // the hardware multiplies unsigned by signed: rounded activations are shifted by this

struct Int8Quads {
  using Input = uint8_t;
  using Operand = int32_t;
  using Panel = Ints;
  using Sum = Ints;
  static constexpr int kPack = 4;
  static void arrange(Input*) {}
  static Operand operand(const Input* from) { return load<Operand>(from); }
  static Panel load_panel(const int8_t* from) { return load<Ints>(from); }
  static Sum multiply_add(Sum sum, Operand a, Panel b) {
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(a), (__m512i)b);
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(a), (__m256i)b);
#endif
  }
};

#elif defined(__AVX2__)

constexpr int kZeroPoint = 0;

// In 16 bits: of four inputs the first and the third, and the second and the fourth.
struct Int8Quads {
  using Input = int16_t;
  struct Operand {
    int32_t even, odd;
  };
  struct Panel {
    Shorts even, odd;
  };
  using Sum = Ints;
  static constexpr int kPack = 4;
  static void arrange(Input* quad) { std::swap(quad[1], quad[2]); }
  static Operand operand(const Input* from) { return {load<int32_t>(from), load<int32_t>(from + 2)}; }
  static Panel load_panel(const int8_t* from) {
    const Shorts quads = load<Shorts>(from);
    return {quads << 8 >> 8, quads >> 8};
  }
  static Sum multiply_add(Sum sum, Operand a, Panel b) {
    return sum + products_of_pairs(b.even, a.even) + products_of_pairs(b.odd, a.odd);
  }
};

#else

constexpr int kZeroPoint = 0;

#endif

template <class Kind, class Weight, class Output, int kRows>
void run_rows(const typename Kind::Input* x, const Weight* panel, int64_t steps, int64_t first_row,
              int64_t first_output, const Finish<Output>& finish, NextPanel next) {
  using Lanes = std::conditional_t<Kind::kPack == 4, Ints, Floats>;
  typename Kind::Sum sums[kRows][kVectors] = {};
  multiply_panel<Kind, kRows>(x + first_row * steps * Kind::kPack, steps * Kind::kPack, panel, steps, sums, next);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t first = first_output + v * kLanes, count = std::min<int64_t>(kLanes, finish.out_features - first);
    if (count <= 0) break;
    for (int row = 0; row < kRows; ++row) finish((Lanes)sums[row][v], first_row + row, first, count);
  }
}

// `run_rows` for 1, 2, … rows.
template <class Kind, class Weight, class Output, int... kRows>
constexpr auto rows_functions(std::integer_sequence<int, kRows...>) {
  return std::array{&run_rows<Kind, Weight, Output, kRows + 1>...};
}

// A thread's runs of items; an item is a panel for some rows.
template <class Kind, class Weight, class Output>
struct Lanewise {
  static constexpr int64_t kRowsOfItem = 64;

  // For rows that read each panel once: the hardware prefetcher does not cover the memory latency.
  static constexpr int64_t kBytesAhead = 6144;

  using Rows = RowsInTurn<Kind>;

  void operator()(const Rows& rows, int64_t num_rows, const Weight* panel, int64_t steps, int64_t first_row,
                  int64_t first_output, const Finish<Output>& finish) const {
    constexpr auto by_rows = rows_functions<Kind, Weight, Output>(std::make_integer_sequence<int, kRowsAtOnce>{});
    const Weight* after = panel + steps * kPanelOutputs * Kind::kPack;
    for_each_group(num_rows, kRowsAtOnce, [&](const RowGroup& group) {
      NextPanel next;
      if (steps >= kStepsAtOnce) {
        next = {after, (after - panel) * int64_t(sizeof *panel), steps / kStepsAtOnce, group};
        if (group.num_groups == 1) next.at = reinterpret_cast<const char*>(panel) + kBytesAhead;
      }
      by_rows[group.count - 1](rows.x, panel, steps, first_row + group.first, first_output, finish, next);
    });
  }
};

#ifndef __AVX512F__

// The same for weights multiplied as floats, with few registers: all rows use a part of the panel in the L1 cache, more
// at a time than registers allow with a whole panel.
template <class Kind, class Weight, class Output>
struct InParts {
  using Sums = RowSums<Float32Rows>;
  static constexpr int64_t kRowsOfItem = Sums::kMaxRows, kStepsOfPart = 128 / Kind::kPack;
  using Direct = Lanewise<Kind, Weight, Output>;
  using Rows = typename Direct::Rows;

  void operator()(const Rows& rows, int64_t num_rows, const Weight* panel, int64_t steps, int64_t first_row,
                  int64_t first_output, const Finish<Output>& finish) {
    constexpr int64_t kPack = Kind::kPack, kStepSize = kPanelOutputs * kPack;
    if (num_rows <= kRowsAtOnce) return Direct{}(rows, num_rows, panel, steps, first_row, first_output, finish);
    const typename Sums::Rows operands(rows.x, num_rows, steps * kPack);
    sums.clear(num_rows);
    for (int64_t step = 0; step < steps; step += kStepsOfPart) {
      const int64_t count = std::min(kStepsOfPart, steps - step);
      const Weight* part = panel + step * kStepSize;
      const Weight* next = part + steps * kStepSize;
      sums.add(operands, first_row, num_rows, step * kPack, floats_of(part, count), count * kPack, next,
               count * kStepSize * int64_t(sizeof *next));
    }
    finish.all(sums.sums, first_row, num_rows, first_output);
  }

 private:
  const float* floats_of(const float* part, int64_t) { return part; }
  const float* floats_of(const uint16_t* part, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step)
      for (int v = 0; v < kVectors; ++v) {
        const auto pairs = Kind::load_panel(part + (step * kPanelOutputs + v * kLanes) * Kind::kPack);
        store(floats + 2 * step * kPanelOutputs + v * kLanes, pairs.first);
        store(floats + (2 * step + 1) * kPanelOutputs + v * kLanes, pairs.second);
      }
    return floats;
  }

  alignas(64) float floats[kStepsOfPart * Kind::kPack * kPanelOutputs];
  Sums sums;
};

#endif

#ifdef INFLIGHT_MATRIX_UNIT

// The same with the matrix unit, a run of panels at a time. A part of a panel stays in the L1 cache while all rows use it,
// 32 at a time; from part to part their sums lie in memory. Rows that are too long for the L2 cache go through all panels
// of the run with some of their inputs, and then with the next ones. Rows that read a panel once take it in one part.
template <class Kind, class Weight, class Output>
struct Tiled {
  using Sum = std::conditional_t<Kind::kPack == 4, int32_t, float>;
  using Rows = TiledRows;
  static constexpr int64_t kRowsOfItem = 256, kMaxPanels = 16, kStepsOfPart = 256, kStepsOfBlock = 2 * kStepsOfPart;

  void operator()(const Rows& rows, int64_t num_rows, const Weight* panels, int64_t num_panels, int64_t steps,
                  int64_t first_row, int64_t first_output, const Finish<Output>& finish) {
    const bool is_read_once = num_rows <= kGroupRows;
    const int64_t steps_of_block = is_read_once ? steps : kStepsOfBlock;
    // How far apart panels' sums lie; 0: at the same place. (A single group's are finished during the next panel.)
    const int64_t rows_of_panel = steps > steps_of_block ? kRowsOfItem : is_read_once ? kGroupRows : 0;
    thread_local AlignedVector<Sum> memory;
    if (const size_t size = (kRowsOfItem + (kMaxPanels - 1) * rows_of_panel) * kPanelOutputs; memory.size() < size)
      memory.resize(size);
    for (int64_t first = 0; first < num_panels; first += kMaxPanels)
      for (int64_t begin = 0; begin < steps; begin += steps_of_block)
        for (int64_t panel = first; panel < std::min(num_panels, first + kMaxPanels); ++panel) {
          auto* sums = reinterpret_cast<Sum(*)[kPanelOutputs]>(memory.data()) +
                       (is_read_once ? panel % 2 : panel - first) * rows_of_panel;
          const Weight* weights = panels + panel * steps * kStepSize;
          const int64_t end = std::min(steps, begin + steps_of_block);
          for (int64_t step = begin, size; step < end; step += size) {
            size = is_read_once ? steps : std::min(kStepsOfPart, end - step);
            int64_t next = step + size < end ? step + size : steps + begin;  // of the next panel
            if (is_read_once) next = kStepsAhead;
            run_part(rows, num_rows, weights, step, size, steps, weights + next * kStepSize, first_row,
                     first_output + panel * kPanelOutputs, sums, finish);
          }
        }
    unfinished.run(finish, kGroupRows);
  }

 private:
  static constexpr int64_t kStepSize = kPanelOutputs * Kind::kPack, kStepsAhead = 128, kRowsOfStep = 2;

  // Adds the products of a part of a panel to all rows' sums, which begin with the first part and end with the last one.
  void run_part(const Rows& rows, int64_t num_rows, const Weight* panel, int64_t step, int64_t size, int64_t steps,
                const Weight* next, int64_t first_row, int64_t first_output, Sum (*sums)[kPanelOutputs],
                const Finish<Output>& finish) {
    const int64_t num_tiles = std::max<int64_t>(1, size / kTileOperands);
    const bool is_last = step + size == steps;
    for_each_tile_group(num_rows, [&](const RowGroup& group) {
      const int64_t row = first_row + group.first;
      NextPanel ahead(next, size * kPanelBytes, num_tiles, group);
      int64_t fetched_row = is_last && group.num_groups > 1 ? row : row + group.count;
      if (step == 0) unit.begin(sums[group.first], int(group.count));
      add_group(unit, rows, row, group, step, panel + step * kStepSize, size, sums[group.first], [&] {
        ahead.advance();
        for (int64_t end = std::min(row + group.count, fetched_row + kRowsOfStep); fetched_row < end; ++fetched_row)
          finish.prefetch(fetched_row, first_output);
        unfinished.run(finish, kRowsOfStep);
      });
      unfinished.run(finish, kGroupRows);
      if (!is_last) return;
      unit.settle();
      unfinished = {sums + group.first, row, row + group.count, first_output};
    });
  }

  // Rows with all their products, which are finished while the unit multiplies others.
  struct Unfinished {
    const Sum (*sums)[kPanelOutputs];
    int64_t row = 0, end = 0, first_output;

    void run(const Finish<Output>& finish, int64_t count) {
      for (; count > 0 && row < end; --count, ++row) finish.panel(*sums++, row, first_output);
    }
  };

  Unfinished unfinished;
  MatrixUnit unit;
};

#endif

template <class Kind, class Weight, class Output>
#if defined(INFLIGHT_MATRIX_UNIT)
using WayOf = std::conditional_t<Kind::kPack == 1, Lanewise<Kind, Weight, Output>, Tiled<Kind, Weight, Output>>;
#elif defined(__AVX512F__)
using WayOf = Lanewise<Kind, Weight, Output>;
#else
using WayOf = std::conditional_t<Kind::kPack == 4, Lanewise<Kind, Weight, Output>, InParts<Kind, Weight, Output>>;
#endif

// All rows and panels; `x` is `[rows, in]` with `in` rounded up to whole operands.
template <class Kind, class Weight, class Output>
void run(const Linear& linear, const typename Kind::Input* x, int64_t num_rows, const Finish<Output>& finish) {
  using Way = WayOf<Kind, Weight, Output>;
  const int64_t num_panels = linear.panels.size(0), steps = linear.panels.size(1), panel_size = linear.panels.stride(0);
  const auto* panels = static_cast<const Weight*>(linear.panels.const_data_ptr());
  const typename Way::Rows rows(x, num_rows, steps);
  if constexpr (requires { Way::kMaxPanels; }) {
    for_each_run<Way>(num_panels, num_rows, steps, [&](Way& way, int64_t panel, int64_t size, int64_t first, int64_t count) {
      way(rows, count, panels + panel * panel_size, size, steps, first, panel * kPanelOutputs, finish);
    });
  } else {
    for_each_panel<Way>(num_panels, num_rows, steps, [&](Way& way, int64_t panel, int64_t first, int64_t count) {
      way(rows, count, panels + panel * panel_size, steps, first, panel * kPanelOutputs, finish);
    });
  }
}

// Rounds a row to [-127, 127] around kZeroPoint; returns its scale, NaN if the row is not finite.
template <class Value, class Input>
float quantise_row(const Value* from, int64_t size, Input* to) {
  Floats largest{};
  Floats not_finite{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats values = load_floats(from + i);
    largest = max(largest, max(values, -values));
    not_finite += values - values;
  }
  float maximum = max_of_lanes(largest);
  float poison = sum_of_lanes(not_finite);
  for (int64_t j = i; j < size; ++j) {
    const float value = float(from[j]);
    maximum = std::max(maximum, std::abs(value));
    poison += value - value;
  }
  if (poison != 0) {  // NaN
    std::fill_n(to, size, Input(kZeroPoint));
    return poison;
  }
  const float inverse = maximum > 0 ? 127 / maximum : 0;
  using Narrow = std::conditional_t<sizeof(Input) == 1, Bytes, Halves>;
  constexpr float kRounder = 12582912.f;
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const Floats shifted = load_floats(from + i) * inverse + kRounder;
    store(to + i, __builtin_convertvector((Ints)shifted - (0x4B400000 - kZeroPoint), Narrow));
  }
  for (; i < size; ++i) {
    const volatile float scaled = float(from[i]) * inverse + kRounder;
    to[i] = Input(std::lrint(scaled - kRounder) + kZeroPoint);
  }
  return maximum / 127;
}

#ifdef INFLIGHT_INT8

template <class Value>
void run_int8(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output) {
  const int64_t in = linear.in_features, num_rows = x.numel() / in;
  const int64_t width = linear.panels.size(1) * Int8Quads::kPack;
  using Input = Int8Quads::Input;
  const Tensor rows = x.contiguous();
  const Tensor rounded = empty({num_rows, width}, kTypeOf<Input>);
  std::vector<float> scales(num_rows);
  for_each_range(num_rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Input* to = rounded.data_ptr<Input>() + row * width;
      scales[row] = quantise_row(rows.const_data_ptr<Value>() + row * in, in, to);
      std::fill(to + in, to + width, Input(0));
      for (int64_t i = 0; i < width; i += Int8Quads::kPack) Int8Quads::arrange(to + i);
    }
  });
  run<Int8Quads, int8_t, Value>(linear, rounded.const_data_ptr<Input>(), num_rows,
                                {linear, scales.data(), additions, output});
}

#endif

}  // namespace

Linear::Linear(const Tensor& panels, const std::optional<Tensor>& bias, const std::optional<Tensor>& scales,
               int64_t in_features, int64_t out_features, Activation activation)
    : panels(panels),
      bias(bias),
      scales(scales),
      in_features(in_features),
      out_features(out_features),
      activation(activation) {
  const auto dtype = panels.scalar_type();
  check_bias();
  CHECK(dtype == kFloat || dtype == kBFloat16 || dtype == kChar, "panels cannot be ", dtype);
  const int64_t pack = dtype == kFloat ? 1 : dtype == kBFloat16 ? 2 : 4;
  CHECK(in_features > 0 && out_features > 0, "a layer must have inputs and outputs");
  check_whole(panels, "panels", 4, dtype);
  check_size(panels, "panels", 0, (out_features + kPanelOutputs - 1) / kPanelOutputs);
  check_size(panels, "panels", 1, (in_features + pack - 1) / pack);
  check_size(panels, "panels", 2, kPanelOutputs);
  check_size(panels, "panels", 3, pack);
  CHECK((dtype == kChar) == scales.has_value(), "panels of int8, and no others, have scales");
  if (scales) {
    check_whole(*scales, "scales", 1, kFloat);
    check_size(*scales, "scales", 0, out_features);
    offsets = zeros({panels.size(0) * kPanelOutputs}, kInt);
    const auto* weights = panels.const_data_ptr<int8_t>();
    const int64_t panel_size = panels.size(1) * kPanelOutputs * pack;
    auto* sums = offsets.data_ptr<int32_t>();
    for (int64_t i = 0; i < panels.numel(); ++i)
      sums[i / panel_size * kPanelOutputs + i / pack % kPanelOutputs] += kZeroPoint * weights[i];
  }
}

Linear::Linear(const Tensor& panels, const Grouped& grouped, const std::optional<Tensor>& order, bool is_exact,
               const std::optional<Tensor>& bias, int64_t in_features, int64_t out_features, Activation activation)
    : panels(panels),
      bias(bias),
      in_features(in_features),
      out_features(out_features),
      activation(activation),
      grouped(grouped),
      is_exact(is_exact),
      order(order) {
  check_bias();
  check_grouped(grouped, panels, out_features, in_features);
  if (!order) return;
  check_whole(*order, "the order", 1, kLong);
  check_size(*order, "the order", 0, in_features);
  for (int64_t i = 0; i < in_features; ++i) {
    const int64_t input = order->const_data_ptr<int64_t>()[i];
    CHECK(input >= 0 && input < in_features, "there is no input ", input);
  }
}

void Linear::check_bias() const {
  if (!bias) return;
  check_whole(*bias, "the bias", 1, bias->scalar_type());
  check_size(*bias, "the bias", 0, out_features);
}

namespace {

// The inputs of each row in another order.
Tensor in_order(const Tensor& x, const Tensor& order) {
  Tensor ordered = empty(x.sizes(), x.scalar_type());
  const Tensor rows = x.contiguous();
  const int64_t size = order.numel(), num_rows = x.numel() / size;
  const int64_t* input = order.const_data_ptr<int64_t>();
  const auto run = [&](const auto* from, auto* to) {
    for_each_range(num_rows, 1 + 16384 / size, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < size; ++i) to[row * size + i] = from[row * size + input[i]];
    });
  };
  if (x.scalar_type() == kFloat) run(rows.const_data_ptr<float>(), ordered.data_ptr<float>());
  else run(rows.const_data_ptr<bfloat16>(), ordered.data_ptr<bfloat16>());
  return ordered;
}

}  // namespace

bool has_panels(ScalarType dtype) {
#ifndef __AVX2__
  return false;
#endif
  return dtype == kFloat || dtype == kBFloat16 || dtype == kChar;
}

Tensor apply(const Linear& linear, const Tensor& x) {
  CHECK(x.defined() && x.dim() > 0, "activations must have a dimension");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = linear.out_features;
  Tensor output = empty(sizes, x.scalar_type());
  apply_to(linear, x, output);
  return output;
}

void apply_to(const Linear& linear, const Tensor& x, Tensor& output) {
  apply_to(linear, x, adapters_of_rows(linear, x.numel() / linear.in_features), output);
}

void apply_to(const Linear& linear, const Tensor& x, const int32_t* adapter_of_row, Tensor& output) {
  check_strided(x, "activations", std::max<int64_t>(1, x.dim()));
  check_size(x, "activations", -1, linear.in_features);
  const int64_t num_rows = x.numel() / linear.in_features;
  if (num_rows == 0) return;
  const Additions additions(linear, x, adapter_of_row);
  if (linear.grouped)
    return run_grouped(linear, linear.order ? in_order(x, *linear.order) : x, additions, output);
  const auto dtype = linear.panels.scalar_type();
  CHECK(x.scalar_type() == dtype || dtype == kChar, "a layer of ", dtype,
              " cannot take ", x.scalar_type());
  if (dtype == kFloat) {
    const Tensor rows = padded_rows<Float32Rows>(x, linear.panels.size(1) * Float32Rows::kPack);
    run<Float32Rows, float, float>(linear, rows.const_data_ptr<float>(), num_rows,
                                   {linear, nullptr, additions, output});
  } else if (dtype == kBFloat16) {
    const Tensor rows = padded_rows<BFloat16Rows>(x, linear.panels.size(1) * BFloat16Rows::kPack);
    run<BFloat16Rows, uint16_t, bfloat16>(
        linear, static_cast<const BFloat16Rows::Input*>(rows.const_data_ptr()), num_rows,
        {linear, nullptr, additions, output});
#ifdef INFLIGHT_INT8
  } else if (dtype == kChar && x.scalar_type() == kFloat) {
    run_int8<float>(linear, x, additions, output);
  } else if (dtype == kChar && x.scalar_type() == kBFloat16) {
    run_int8<bfloat16>(linear, x, additions, output);
#endif
  } else {
    CHECK(false, "this CPU has no instructions for layers of ", dtype);
  }
}

void pack_panels(const Tensor& weight, const Tensor& panels) {
  check_whole(weight, "a weight", 2, panels.scalar_type());
  check_whole(panels, "panels", 4, weight.scalar_type());
  const int64_t num_outputs = weight.size(0), num_panels = (num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  const int64_t num_steps = panels.size(1), width = panels.size(3);
  CHECK(width * panels.element_size() == sizeof(uint32_t), "what lies together in panels must have 4 bytes");
  check_size(panels, "panels", 0, num_panels);
  check_size(panels, "panels", 2, kPanelOutputs);
  check_size(weight, "a weight", 1, num_steps * width);
  const auto* from = static_cast<const uint32_t*>(weight.const_data_ptr());
  auto* to = static_cast<uint32_t*>(panels.data_ptr());
  constexpr int64_t kStepsAtOnce = 16;  // a line of the cache in each row
  for_each_range(num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t rows = std::min<int64_t>(kPanelOutputs, num_outputs - panel * kPanelOutputs);
      const uint32_t* first = from + panel * kPanelOutputs * num_steps;
      uint32_t* own = to + panel * kPanelOutputs * num_steps;
      if (rows < kPanelOutputs) std::fill_n(own, kPanelOutputs * num_steps, 0);
      for (int64_t step = 0; step < num_steps; step += kStepsAtOnce)
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t s = step; s < std::min(num_steps, step + kStepsAtOnce); ++s)
            own[s * kPanelOutputs + row] = first[row * num_steps + s];
    }
  });
}

}  // namespace inflight
