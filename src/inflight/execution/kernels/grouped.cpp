#include "grouped.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "checks.h"
#include "convert.h"
#include "linear.h"

namespace inflight {
namespace {

static_assert(kPanelOutputs == kChunk);  // a chunk is as wide as it is long

// Where a number's low four bits (or all eight) lie in its chunk, and in which half of the byte.
struct Place {
  int64_t byte;
  int shift;
};

Place place_of(const Grouped& layout, int64_t output, int64_t input) {
  const int64_t of_outputs = kOutputsOfQuads * kChunk * layout.bits / 8;
  const int64_t first = output / kOutputsOfQuads * of_outputs, lane = output % kOutputsOfQuads * 4 + input % 4;
  if (layout.bits == 8) return {first + input / 4 * 64 + lane, 0};
  return {first + input / 8 * 64 + lane, input / 4 % 2 * 4};
}

// The same for the bits above the fourth.
Place high_place_of(const Grouped& layout, int64_t output, int64_t input) {
  const int64_t high_bits = layout.bits - 4, of_outputs = kOutputsOfQuads * kChunk * layout.bits / 8;
  const int64_t first = output / kOutputsOfQuads * of_outputs + 256, bit = input / 4 * high_bits;
  return {first + bit / 8 * 64 + output % kOutputsOfQuads * 4 + input % 4, int(bit % 8)};
}

void write_number(const Grouped& layout, uint8_t* chunk, int64_t output, int64_t input, uint8_t number) {
  const Place low = place_of(layout, output, input);
  if (layout.bits == 8) {
    chunk[low.byte] = number;
    return;
  }
  chunk[low.byte] |= (number & 15) << low.shift;
  if (layout.bits == 4) return;
  const Place high = high_place_of(layout, output, input);
  chunk[high.byte] |= (number >> 4) << high.shift;
}

int read_number(const Grouped& layout, const uint8_t* chunk, int64_t output, int64_t input) {
  const Place low = place_of(layout, output, input);
  if (layout.bits == 8) return chunk[low.byte];
  const int number = chunk[low.byte] >> low.shift & 15;
  if (layout.bits == 4) return number;
  const Place high = high_place_of(layout, output, input);
  return number | (chunk[high.byte] >> high.shift & ((1 << (layout.bits - 4)) - 1)) << 4;
}

float read_half(const uint8_t* halves, int64_t index) { return load<at::Half>(halves + 2 * index); }

}  // namespace

Grouped::Grouped(at::IntArrayRef layout)
    : bits(layout.at(0)), coarse(layout.at(1)), fine(layout.at(2)), minima(layout.at(3)), middle(layout.at(4)) {
  TORCH_CHECK(bits == 4 || bits == 5 || bits == 6 || bits == 8, "numbers cannot have ", bits, " bits");
  TORCH_CHECK(coarse > 0 && coarse % kChunk == 0 && coarse < 1 << 24, "a coarse scale cannot stand for ", coarse, " inputs");
  TORCH_CHECK(fine >= 0 && fine <= 2, "a chunk cannot have ", fine, " fine scales");
  TORCH_CHECK(middle >= 0 && middle < 1 << bits, "the middle cannot be ", middle);
}

void check_grouped(const Grouped& layout, const at::Tensor& panels, int64_t out_features, int64_t in_features) {
  TORCH_CHECK(in_features > 0 && out_features > 0, "a layer must have inputs and outputs");
  TORCH_CHECK(in_features < int64_t(1) << 40 && out_features < int64_t(1) << 40, "a layer is too large");
  check_whole(panels, "panels", 2, at::kByte);
  check_size(panels, "panels", 0, (out_features + kPanelOutputs - 1) / kPanelOutputs);
  check_size(panels, "panels", 1, layout.num_runs(in_features) * layout.run_bytes());
}

at::Tensor pack_grouped(at::IntArrayRef words, const at::Tensor& numbers, const at::Tensor& coarse,
                        const std::optional<at::Tensor>& fine, const std::optional<at::Tensor>& coarse_minima,
                        const std::optional<at::Tensor>& fine_minima) {
  const Grouped layout(words);
  check_whole(numbers, "numbers", 2, at::kByte);
  TORCH_CHECK(numbers.numel() > 0, "a layer must have inputs and outputs");
  const int64_t out = numbers.size(0), in = numbers.size(1), num_runs = layout.num_runs(in);
  const int64_t num_chunks = num_runs * layout.chunks();
  const auto check = [&](const std::optional<at::Tensor>& each, const char* name, bool needed, at::ScalarType dtype,
                         int64_t size) {
    TORCH_CHECK(each.has_value() == needed, "this layout has ", needed ? "" : "no ", name);
    if (!needed) return;
    check_whole(*each, name, 2, dtype);
    check_size(*each, name, 0, out);
    check_size(*each, name, 1, size);
  };
  check(coarse, "coarse scales", true, at::kHalf, num_runs);
  check(fine, "fine scales", layout.fine > 0, at::kChar, num_chunks * layout.fine);
  check(coarse_minima, "coarse minima", layout.minima, at::kHalf, num_runs);
  check(fine_minima, "fine minima", layout.minima && layout.fine > 0, at::kChar, num_chunks);
  const int64_t num_panels = (out + kPanelOutputs - 1) / kPanelOutputs;
  at::Tensor panels = at::zeros({num_panels, num_runs * layout.run_bytes()}, at::kByte);
  const auto* from = numbers.const_data_ptr<uint8_t>();
  at::parallel_for(0, out, kPanelOutputs, [&](int64_t begin, int64_t end) {
    // Outputs of a panel share bytes with nobody else's.
    for (int64_t row = begin; row < end; ++row) {
      const int64_t output = row % kPanelOutputs;
      uint8_t* run = panels.data_ptr<uint8_t>() + row / kPanelOutputs * panels.size(1);
      for (int64_t r = 0; r < num_runs; ++r, run += layout.run_bytes()) {
        store(run + 2 * output, coarse.const_data_ptr<at::Half>()[row * num_runs + r]);
        if (layout.minima)
          store(run + 2 * kPanelOutputs + 2 * output, coarse_minima->const_data_ptr<at::Half>()[row * num_runs + r]);
        uint8_t* chunk = run + layout.head_bytes();
        for (int64_t c = r * layout.chunks(); c < (r + 1) * layout.chunks(); ++c, chunk += layout.chunk_bytes()) {
          for (int64_t part = 0; part < layout.fine; ++part)
            chunk[part * kPanelOutputs + output] =
                fine->const_data_ptr<int8_t>()[(row * num_chunks + c) * layout.fine + part];
          if (layout.minima_bytes())
            chunk[layout.fine_bytes() + output] = fine_minima->const_data_ptr<int8_t>()[row * num_chunks + c];
          uint8_t* to = chunk + layout.fine_bytes() + layout.minima_bytes();
          for (int64_t i = 0; i < std::min<int64_t>(kChunk, in - c * kChunk); ++i)
            write_number(layout, to, output, i, from[row * in + c * kChunk + i]);
        }
      }
    }
  });
  return panels;
}

at::Tensor grouped_rows(at::IntArrayRef words, const at::Tensor& panels, const at::Tensor& rows, int64_t out_features,
                        int64_t in_features, at::ScalarType dtype) {
  const Grouped layout(words);
  check_grouped(layout, panels, out_features, in_features);
  check_whole(rows, "row numbers", 1, at::kLong);
  const int64_t num_rows = rows.size(0), half = layout.fine == 2 ? kChunk / 2 : kChunk;
  const auto* numbers = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_rows; ++i)
    TORCH_CHECK(numbers[i] >= 0 && numbers[i] < out_features, "there is no row ", numbers[i]);
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "rows cannot be ", dtype);
  at::Tensor output = at::empty({num_rows, in_features}, dtype);
  const auto fill = [&](auto* to) {
    at::parallel_for(0, num_rows, 1 + 32768 / in_features, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t number = numbers[row], o = number % kPanelOutputs;
        const uint8_t* run = panels.const_data_ptr<uint8_t>() + number / kPanelOutputs * panels.size(1);
        for (int64_t i = 0; i < in_features; i += kChunk) {
          if (i > 0 && i % layout.coarse == 0) run += layout.run_bytes();
          const uint8_t* chunk = run + layout.head_bytes() + i % layout.coarse / kChunk * layout.chunk_bytes();
          const auto* fine = reinterpret_cast<const int8_t*>(chunk) + o;
          float minimum = layout.minima ? read_half(run, kPanelOutputs + o) : 0;
          if (layout.minima_bytes()) minimum *= fine[layout.fine_bytes()];
          chunk += layout.fine_bytes() + layout.minima_bytes();
          for (int64_t j = 0; j < std::min<int64_t>(kChunk, in_features - i); ++j) {
            const float scale = read_half(run, o) * (layout.fine ? float(fine[j / half * kPanelOutputs]) : 1.f);
            const float value = float(read_number(layout, chunk, o, j) - int(layout.middle)) * scale - minimum;
            store_float(value, to + row * in_features + i + j);
          }
        }
      }
    });
  };
  if (dtype == at::kFloat) fill(output.data_ptr<float>());
  else fill(output.data_ptr<at::BFloat16>());
  return output;
}

}  // namespace inflight
