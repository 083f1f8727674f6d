// Shared by all layers in panels: work partitioning and epilogues.
#pragma once


#include "convert.h"
#include "linear.h"
#include "parallel.h"

namespace inflight {

constexpr int kVectors = kPanelOutputs / kLanes;
constexpr int64_t kSharesOfThread = 4;   // of all rows and panels
constexpr int64_t kRowsOfReading = 5;    // that are multiplied while a panel is prefetched
constexpr int64_t kMinShareSize = 8192;  // such rows times operands: some 4 µs

// A group of rows computed together.
struct RowGroup {
  int64_t first, count, number, num_groups;
};

// Calls `function(group)` for groups of at most `at_once` of `num_rows` rows, as equal as can be.
template <class Function>
inline void for_each_group(int64_t num_rows, int64_t at_once, const Function& function) {
  const int64_t num_groups = (num_rows + at_once - 1) / at_once;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t low = num_rows * group / num_groups, high = num_rows * (group + 1) / num_groups;
    function(RowGroup{low, high - low, group, num_groups});
  }
}

// The panel after the current one, prefetched meanwhile: while the same panel is reread, the hardware prefetcher does
// not see the next one. Each group of rows prefetches a part of it.
struct NextPanel {
  const char* at = nullptr;
  int64_t bytes_of_step = 0;

  NextPanel() = default;
  // The part of the `num_bytes` at `next` that a group prefetches in this many steps.
  NextPanel(const void* next, int64_t num_bytes, int64_t num_steps, const RowGroup& group)
      : at(static_cast<const char*>(next) + num_bytes * group.number / group.num_groups),
        bytes_of_step(num_bytes / (group.num_groups * num_steps)) {}

  void advance() {
    for (int64_t line = 0; line < bytes_of_step; line += 64) __builtin_prefetch(at + line, 0, 2);
    at += bytes_of_step;
  }
};

// The epilogue of a sum. A null pointer: none.
template <class Output>
struct Finish {
  int64_t out_features;
  const Output* bias;
  Activation activation;
  const int32_t* offsets;  // with the scales: of int8; for whole panels
  const float *scales, *row_scales;
  const float* const* additions;  // by row
  Output* output;  // [rows, out]

  Finish(const Linear& linear, const float* row_scales, const Additions& additions, Tensor& output)
      : out_features(linear.out_features),
        bias(linear.bias ? linear.bias->const_data_ptr<Output>() : nullptr),
        activation(linear.activation),
        offsets(linear.scales ? linear.offsets.const_data_ptr<int32_t>() : nullptr),
        scales(linear.scales ? linear.scales->const_data_ptr<float>() : nullptr),
        row_scales(row_scales),
        additions(additions.rows()),
        output(output.data_ptr<Output>()) {}

  // The `count` outputs of a row from `first` on.
  void operator()(Floats sum, int64_t row, int64_t first, int64_t count) const {
    if (additions && additions[row]) sum += load<Floats>(additions[row] + first);
    if (bias) sum += part(bias + first, count);
    if (activation) sum = activation(sum);
    Output* to = output + row * out_features + first;
    if (count == kLanes) return store_floats(sum, to);
    float lanes[kLanes];
    store(lanes, sum);
    for (int64_t lane = 0; lane < count; ++lane) store_float(lanes[lane], to + lane);
  }

  void operator()(Ints sum, int64_t row, int64_t first, int64_t count) const {
    (*this)(scaled(sum, row, first, count), row, first, count);
  }

  // Fetches the place of a row's outputs of a panel.
  void prefetch(int64_t row, int64_t first_output) const {
    auto* place = reinterpret_cast<const char*>(output + row * out_features + first_output);
    for (size_t line = 0; line < kPanelOutputs * sizeof(Output); line += 64) __builtin_prefetch(place + line, 1, 3);
  }

  // A row's outputs of one panel, from `first_output` on. (Calls would cost the loop around this its registers.)
  template <class Sum>
  void panel(const Sum* sums, int64_t row, int64_t first_output) const {
    if (additions || activation || first_output + kPanelOutputs > out_features)
      return any_panel(sums, row, first_output);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t first = first_output + v * kLanes;
      Floats sum = scaled(load<LanesOf<Sum>>(sums + v * kLanes), row, first, kLanes);
      if (bias) sum += load_floats(bias + first);
      store_floats(sum, output + row * out_features + first);
    }
  }

  // The same of `count` rows.
  template <class Sum>
  void all(const Sum (*sums)[kPanelOutputs], int64_t first_row, int64_t count, int64_t first_output) const {
    for (int64_t row = 0; row < count; ++row) panel(sums[row], first_row + row, first_output);
  }

 private:
  template <class Sum>
  using LanesOf = std::conditional_t<std::is_same_v<Sum, int32_t>, Ints, Floats>;

  template <class Sum>
  [[gnu::noinline]] void any_panel(const Sum* sums, int64_t row, int64_t first_output) const {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t first = first_output + v * kLanes, left = out_features - first;
      if (left <= 0) break;
      (*this)(load<LanesOf<Sum>>(sums + v * kLanes), row, first, std::min<int64_t>(kLanes, left));
    }
  }

  Floats scaled(Floats sum, int64_t, int64_t, int64_t) const { return sum; }
  Floats scaled(Ints sum, int64_t row, int64_t first, int64_t count) const {
    const Floats scale = part(scales + first, count) * row_scales[row];
    return __builtin_convertvector(sum - load<Ints>(offsets + first), Floats) * scale;
  }

  template <class Value>
  static Floats part(const Value* values, int64_t count) {
    if (count == kLanes) return load_floats(values);
    float lanes[kLanes] = {};
    read_floats(values, count, lanes);
    return load<Floats>(lanes);
  }
};

// Calls `run(way, panel, num_panels, first_row, count)` for all pairs of neighbouring panels and `Way::kRowsOfItem`
// rows, on all threads; a panel has `steps` operands for each row. Each thread gets several shares, each with its own
// `Way`, so that a stalled core does not stall the others for long.
template <class Way, class Run>
void for_each_run(int64_t num_panels, int64_t num_rows, int64_t steps, const Run& run) {
  const int64_t num_blocks = (num_rows + Way::kRowsOfItem - 1) / Way::kRowsOfItem;
  const int64_t num_items = num_blocks * num_panels, num_threads = thread_count();
  const int64_t item_size = steps * (kRowsOfReading + std::min(num_rows, Way::kRowsOfItem));
  int64_t num_shares = std::clamp<int64_t>(num_items * item_size / kMinShareSize, 1, kSharesOfThread * num_threads);
  if (num_shares > num_threads) num_shares -= num_shares % num_threads;
  for_each_item(num_shares, [&](int64_t share) {
    Way way;
    const int64_t end = num_items * (share + 1) / num_shares;
    for (int64_t item = num_items * share / num_shares, count; item < end; item += count) {
      const int64_t first = item / num_panels * Way::kRowsOfItem, panel = item % num_panels;
      count = std::min(end - item, num_panels - panel);
      run(way, panel, count, first, std::min(Way::kRowsOfItem, num_rows - first));
    }
  });
}

// The same, panel by panel: calls `run(way, panel, first_row, count)`.
template <class Way, class Run>
void for_each_panel(int64_t num_panels, int64_t num_rows, int64_t steps, const Run& run) {
  const auto run_each = [&](Way& way, int64_t panel, int64_t count, int64_t first_row, int64_t num_rows) {
    for (int64_t end = panel + count; panel < end; ++panel) run(way, panel, first_row, num_rows);
  };
  for_each_run<Way>(num_panels, num_rows, steps, run_each);
}

}  // namespace inflight
