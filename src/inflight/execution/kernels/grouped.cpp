#include "grouped.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "checks.h"
#include "convert.h"
#include "linear.h"
#include "parallel.h"

namespace inflight {
namespace {

static_assert(kPanelOutputs == kChunk);  // a chunk is as wide as it is long

// Where a number's low bits lie in its chunk, and from which bit of the byte on.
struct Place {
  int64_t byte;
  int shift;
};

Place place_of(const Grouped& layout, int64_t output, int64_t input) {
  const int64_t of_outputs = kOutputsOfQuads * kChunk * layout.bits / 8;
  const int64_t first = output / kOutputsOfQuads * of_outputs, lane = output % kOutputsOfQuads * 4 + input % 4;
  const int64_t in_byte = 8 / layout.low_bits();
  return {first + input / 4 / in_byte * 64 + lane, int(input / 4 % in_byte * layout.low_bits())};
}

// The same for the bits above these.
Place high_place_of(const Grouped& layout, int64_t output, int64_t input) {
  const int64_t high_bits = layout.bits - layout.low_bits(), of_outputs = kOutputsOfQuads * kChunk * layout.bits / 8;
  const int64_t first = output / kOutputsOfQuads * of_outputs + layout.low_bits() * 64, bit = input / 4 * high_bits;
  return {first + bit / 8 * 64 + output % kOutputsOfQuads * 4 + input % 4, int(bit % 8)};
}

int read_number(const Grouped& layout, const uint8_t* chunk, int64_t output, int64_t input) {
  const Place low = place_of(layout, output, input);
  const int64_t low_bits = layout.low_bits();
  const int number = chunk[low.byte] >> low.shift & ((1 << low_bits) - 1);
  if (layout.bits == low_bits) return number;
  const Place high = high_place_of(layout, output, input);
  return number | (chunk[high.byte] >> high.shift & ((1 << (layout.bits - low_bits)) - 1)) << low_bits;
}

float read_scale(const Grouped& layout, const uint8_t* scales, int64_t index) {
  const uint8_t* from = scales + layout.scale_bytes * index;
  return layout.scale_bytes == 4 ? load<float>(from) : float(load<float16>(from));
}

float decoded(const Grouped& layout, int number) {
  if (layout.code == Code::kE4M3) {
    const int magnitude = number & 127, exponent = magnitude >> 3;
    const float value = exponent ? std::ldexp(float(8 + magnitude % 8), exponent - 10) : std::ldexp(float(magnitude), -9);
    return number & 128 ? -value : value;
  }
  const uint8_t* table = layout.table();
  return float((table ? table[number] : number) - int(layout.middle));
}

constexpr uint8_t kTableE2M1[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t kTableNonlinear[] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kTableLattice2[] = {21, 39, 55, 56, 57, 63, 64, 64, 64, 64, 65, 71, 72, 73, 89, 107};
constexpr uint8_t kTableLattice3[] = {2, 12, 20, 28, 36, 44, 52, 60, 68, 76, 84, 92, 100, 108, 116, 126};
constexpr uint8_t kTableOdd[] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
constexpr const uint8_t* kTables[] = {nullptr, nullptr, kTableE2M1, kTableNonlinear, kTableLattice2, kTableLattice3, kTableOdd};

int64_t number_of(Sizes layout, size_t place) {
  CHECK(place < layout.size(), "a layout cannot have ", layout.size(), " numbers");
  return layout[place];
}

}  // namespace

const uint8_t* Grouped::table() const { return kTables[int64_t(code)]; }

Grouped::Grouped(Sizes layout)
    : bits(number_of(layout, 0)),
      coarse(number_of(layout, 1)),
      fine(number_of(layout, 2)),
      minima(number_of(layout, 3)),
      middle(number_of(layout, 4)),
      scale_bytes(number_of(layout, 5)),
      code(Code(number_of(layout, 6))) {
  CHECK((bits >= 2 && bits <= 6) || bits == 8, "numbers cannot have ", bits, " bits");
  CHECK(coarse > 0 && coarse % kChunk == 0 && coarse < 1 << 24, "a coarse scale cannot stand for ", coarse, " inputs");
  CHECK(fine >= 0 && fine <= 2, "a chunk cannot have ", fine, " fine scales");
  CHECK(code >= Code::kWhole && code <= Code::kOdd, "there is no code ", int64_t(code));
  CHECK(middle >= 0 && middle < 1 << (table() ? 8 : bits), "the middle cannot be ", middle);
  CHECK(!minima || middle == 0, "numbers above a minimum cannot have a middle");
  CHECK(scale_bytes == 2 || scale_bytes == 4, "a scale cannot have ", scale_bytes, " bytes");
  CHECK(!table() || bits == 4, "numbers of ", bits, " bits cannot be looked up");
  CHECK(code != Code::kE4M3 || bits == 8, "a float of eight bits cannot have ", bits);
}

void write_numbers(const Grouped& layout, uint8_t* to, int64_t output, const uint8_t* numbers) {
  switch (layout.bits) {
    case 2: return write_numbers<2>(to, output, numbers);
    case 3: return write_numbers<3>(to, output, numbers);
    case 4: return write_numbers<4>(to, output, numbers);
    case 5: return write_numbers<5>(to, output, numbers);
    case 6: return write_numbers<6>(to, output, numbers);
    default: return write_numbers<8>(to, output, numbers);
  }
}

void check_grouped(const Grouped& layout, const Tensor& panels, int64_t out_features, int64_t in_features) {
  CHECK(in_features > 0 && out_features > 0, "a layer must have inputs and outputs");
  CHECK(in_features < int64_t(1) << 40 && out_features < int64_t(1) << 40, "a layer is too large");
  check_whole(panels, "panels", 2, kByte);
  check_size(panels, "panels", 0, (out_features + kPanelOutputs - 1) / kPanelOutputs);
  check_size(panels, "panels", 1, layout.num_runs(in_features) * layout.run_bytes());
}

Tensor pack_grouped(Sizes words, const Tensor& numbers, const Tensor& coarse,
                        const std::optional<Tensor>& fine, const std::optional<Tensor>& coarse_minima,
                        const std::optional<Tensor>& fine_minima) {
  const Grouped layout(words);
  check_whole(numbers, "numbers", 2, kByte);
  CHECK(numbers.numel() > 0, "a layer must have inputs and outputs");
  const int64_t out = numbers.size(0), in = numbers.size(1), num_runs = layout.num_runs(in);
  const int64_t num_chunks = num_runs * layout.chunks();
  const auto check = [&](const std::optional<Tensor>& each, const char* name, bool needed, ScalarType dtype,
                         int64_t size) {
    CHECK(each.has_value() == needed, "this layout has ", needed ? "" : "no ", name);
    if (!needed) return;
    check_whole(*each, name, 2, dtype);
    check_size(*each, name, 0, out);
    check_size(*each, name, 1, size);
  };
  const ScalarType scale_type = layout.scale_bytes == 4 ? kFloat : kHalf;
  check(coarse, "coarse scales", true, scale_type, num_runs);
  check(fine, "fine scales", layout.fine > 0, kChar, num_chunks * layout.fine);
  check(coarse_minima, "coarse minima", layout.minima, scale_type, num_runs);
  check(fine_minima, "fine minima", layout.minima && layout.fine > 0, kChar, num_chunks * layout.fine);
  const int64_t num_panels = (out + kPanelOutputs - 1) / kPanelOutputs;
  Tensor panels = zeros({num_panels, num_runs * layout.run_bytes()}, kByte);
  const auto* from = numbers.const_data_ptr<uint8_t>();
  const auto* scales = static_cast<const uint8_t*>(coarse.const_data_ptr());
  const auto* least = layout.minima ? static_cast<const uint8_t*>(coarse_minima->const_data_ptr()) : nullptr;
  const int64_t bytes = layout.scale_bytes;
  for_each_range(out, kPanelOutputs, [&](int64_t begin, int64_t end) {
    // Outputs of a panel share bytes with no other panel's.
    for (int64_t row = begin; row < end; ++row) {
      const int64_t output = row % kPanelOutputs;
      uint8_t* run = panels.data_ptr<uint8_t>() + row / kPanelOutputs * panels.size(1);
      for (int64_t r = 0; r < num_runs; ++r, run += layout.run_bytes()) {
        const int64_t number = (row * num_runs + r) * bytes;
        std::memcpy(run + bytes * output, scales + number, bytes);
        if (least) std::memcpy(run + bytes * (kPanelOutputs + output), least + number, bytes);
        uint8_t* chunk = run + layout.head_bytes();
        for (int64_t c = r * layout.chunks(); c < (r + 1) * layout.chunks(); ++c, chunk += layout.chunk_bytes()) {
          for (int64_t part = 0; part < layout.fine; ++part) {
            const int64_t place = part * kPanelOutputs + output, own = (row * num_chunks + c) * layout.fine + part;
            chunk[place] = fine->const_data_ptr<int8_t>()[own];
            if (layout.minima) chunk[layout.fine_bytes() + place] = fine_minima->const_data_ptr<int8_t>()[own];
          }
          uint8_t whole[kChunk] = {};
          const int64_t count = std::clamp<int64_t>(in - c * kChunk, 0, kChunk);
          std::copy_n(from + row * in + c * kChunk, count, whole);
          write_numbers(layout, chunk + layout.fine_bytes() + layout.minima_bytes(), output, whole);
        }
      }
    }
  });
  return panels;
}

Tensor grouped_rows(Sizes words, const Tensor& panels, const Tensor& rows, int64_t out_features,
                        int64_t in_features, ScalarType dtype) {
  const Grouped layout(words);
  check_grouped(layout, panels, out_features, in_features);
  check_whole(rows, "row numbers", 1, kLong);
  const int64_t num_rows = rows.size(0), half = layout.fine == 2 ? kChunk / 2 : kChunk;
  const auto* numbers = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_rows; ++i)
    CHECK(numbers[i] >= 0 && numbers[i] < out_features, "there is no row ", numbers[i]);
  CHECK(dtype == kFloat || dtype == kBFloat16, "rows cannot be ", dtype);
  Tensor output = empty({num_rows, in_features}, dtype);
  const auto fill = [&](auto* to) {
    for_each_range(num_rows, 1 + 32768 / in_features, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t number = numbers[row], o = number % kPanelOutputs;
        const uint8_t* run = panels.const_data_ptr<uint8_t>() + number / kPanelOutputs * panels.size(1);
        for (int64_t i = 0; i < in_features; i += kChunk) {
          if (i > 0 && i % layout.coarse == 0) run += layout.run_bytes();
          const uint8_t* chunk = run + layout.head_bytes() + i % layout.coarse / kChunk * layout.chunk_bytes();
          const auto* fine = reinterpret_cast<const int8_t*>(chunk) + o;
          const float least = layout.minima ? read_scale(layout, run, kPanelOutputs + o) : 0;
          chunk += layout.fine_bytes() + layout.minima_bytes();
          for (int64_t j = 0; j < std::min<int64_t>(kChunk, in_features - i); ++j) {
            const int64_t part = j / half * kPanelOutputs;
            const float scale = read_scale(layout, run, o) * (layout.fine ? float(fine[part]) : 1.f);
            const float minimum = least * (layout.minima_bytes() ? float(fine[layout.fine_bytes() + part]) : 1.f);
            const float value = decoded(layout, read_number(layout, chunk, o, j)) * scale - minimum;
            store_float(value, to + row * in_features + i + j);
          }
        }
      }
    });
  };
  if (dtype == kFloat) fill(output.data_ptr<float>());
  else fill(output.data_ptr<bfloat16>());
  return output;
}

// ------------------------------------------------------------------------------------------------ rounding

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
