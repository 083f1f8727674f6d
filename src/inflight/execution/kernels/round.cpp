#include "round.h"

#include "parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "checks.h"
#include "linear.h"
#include "vectors.h"

namespace inflight {
namespace {

constexpr float kShares[] = {1, 0.95f, 0.9f, 0.85f, 0.8f};
constexpr float kLargest = 15, kMiddle = 8;  // of four bits

// A group's scale (NaN if it is not finite), its minimum, and the numbers `[0, 15]` of its inputs, a multiple of 32.
struct Group {
  float16 scale{}, minimum{};
  std::vector<float> numbers, tried;

  explicit Group(int64_t size) : numbers(size), tried(size) {}

  // The squared error of `number * scale - minimum`, where numbers are rounded to be nearest to `x`.
  float attempt(const float* x, float scale, float minimum) {
    constexpr float kRounder = 12582912.f;  // 1.5 * 2^23: rounds to an integer
    Floats error{};
    for (size_t i = 0; i < tried.size(); i += kLanes) {
      const Floats value = load<Floats>(x + i);
      const Floats number = (value + minimum) / scale + kRounder - kRounder;
      const Floats within = max(min(number, broadcast(kLargest)), broadcast(0));
      const Floats off = within * scale - minimum - value;
      error += off * off;
      store(&tried[i], within);
    }
    return sum_of_lanes(error);
  }

  void round(const float* x, bool minima) {
    Floats not_finite{};
    for (size_t i = 0; i < numbers.size(); i += kLanes) not_finite += load<Floats>(x + i) - load<Floats>(x + i);
    scale = std::numeric_limits<float>::quiet_NaN();
    if (any(not_finite != 0)) return;
    const auto [low, high] = std::minmax_element(x, x + numbers.size());
    const float largest = std::abs(*low) > std::abs(*high) ? *low : *high;  // becomes 0, the furthest from the middle
    const float center = minima ? *low / 2 + *high / 2 : 0;
    const float reach = minima ? *high / 2 - *low / 2 : largest;
    float least = kInfinity;
    minimum = float16(minima ? -center : 0.f);
    std::fill(numbers.begin(), numbers.end(), minima ? 0 : kMiddle);
    for (const float share : kShares) {
      const float16 step(minima ? 2 * reach * share / kLargest : -reach * share / kMiddle);
      const float16 below(minima ? reach * share - center : 0.f);
      if (float(step) == 0) {
        scale = step;
        return;
      }
      const float error = attempt(x, step, minima ? float(below) : kMiddle * float(step));
      if (!(error < least)) continue;
      least = error;
      scale = step;
      if (minima) minimum = below;
      numbers.swap(tried);
    }
  }
};

float float_from(float value) { return value; }
float float_from(bfloat16 value) { return value; }
float float_from(float16 value) { return value; }

template <class Value>
void round_rows(const Grouped& layout, const Tensor& weight, Tensor& panels, int64_t begin, int64_t end) {
  const int64_t in = weight.size(1), num_runs = layout.num_runs(in);
  std::vector<float> x(layout.coarse);
  Group group(layout.coarse);
  uint8_t numbers[kChunk];
  for (int64_t row = begin; row < end; ++row) {
    const Value* from = weight.const_data_ptr<Value>() + row * in;
    const int64_t output = row % kPanelOutputs;
    uint8_t* run = panels.data_ptr<uint8_t>() + row / kPanelOutputs * panels.size(1);
    for (int64_t r = 0; r < num_runs; ++r, run += layout.run_bytes()) {
      const int64_t count = std::min(layout.coarse, in - r * layout.coarse);
      for (int64_t i = 0; i < count; ++i) x[i] = float_from(from[r * layout.coarse + i]);
      std::fill(x.begin() + count, x.end(), 0.f);
      group.round(x.data(), layout.minima);
      store(run + 2 * output, group.scale);
      if (layout.minima) store(run + 2 * (kPanelOutputs + output), group.minimum);
      for (int64_t chunk = 0; chunk < layout.chunks(); ++chunk) {
        for (int i = 0; i < kChunk; ++i) numbers[i] = uint8_t(group.numbers[chunk * kChunk + i]);
        write_numbers(layout, run + layout.head_bytes() + chunk * layout.chunk_bytes(), output, numbers);
      }
    }
  }
}

}  // namespace

Tensor round_grouped(Sizes words, const Tensor& weight) {
  const Grouped layout(words);
  CHECK(layout.bits == 4 && layout.fine == 0 && layout.code == Code::kWhole && layout.scale_bytes == 2 &&
                  layout.middle == (layout.minima ? 0 : int64_t(kMiddle)),
              "weights cannot be rounded to this layout");
  check_whole(weight, "the weight", 2, weight.scalar_type());
  CHECK(weight.numel() > 0, "a layer must have inputs and outputs");
  const int64_t out = weight.size(0);
  Tensor panels =
      zeros({(out + kPanelOutputs - 1) / kPanelOutputs, layout.num_runs(weight.size(1)) * layout.run_bytes()}, kByte);
  for_each_range(panels.size(0), 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPanelOutputs, last = std::min(out, end * kPanelOutputs);
    if (weight.scalar_type() == kFloat) round_rows<float>(layout, weight, panels, first, last);
    else if (weight.scalar_type() == kBFloat16) round_rows<bfloat16>(layout, weight, panels, first, last);
    else if (weight.scalar_type() == kHalf) round_rows<float16>(layout, weight, panels, first, last);
    else CHECK(false, "weights cannot be ", weight.scalar_type());
  });
  return panels;
}

}  // namespace inflight
