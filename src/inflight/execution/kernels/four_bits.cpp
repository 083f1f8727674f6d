// Weights are unpacked in registers: half a byte is a shift and a mask away from the unsigned factor that VNNI takes. Few
// rows go through a whole panel, which is then one stream of memory; more of them through half of it at a time, because
// every row needs two registers for a vector of outputs.
//
// An output is one sum over the groups in ascending order, whatever thread computes it and whatever rows are beside it.
#include "four_bits.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "checks.h"
#include "panels.h"

namespace inflight {
namespace {

constexpr int64_t kScaleBytes = kPanelOutputs * sizeof(uint16_t);
constexpr int64_t kBytesOfInput = kPanelOutputs / 2;  // in a panel
constexpr int kMiddle = 8;                            // of the numbers

int64_t group_size(const Linear& linear) { return (linear.panels.size(2) - kScaleBytes) / kBytesOfInput; }

#ifdef __AVX512VNNI__

constexpr int kRowsAtOnce = 6, kRowsOfWholePanels = 6;
constexpr int kInputsOfLoad = 8;  // 64 bytes hold them for a vector of outputs

// Rows of activations, rounded by groups.
struct RoundedRows {
  int64_t num_groups, group;
  std::vector<int8_t> numbers;   // [rows, groups, group]
  std::vector<float> scales;     // [rows, groups]; NaN for a group that is not finite
  std::vector<int32_t> offsets;  // [rows, groups]: what makes up for the middle of the weights' numbers

  RoundedRows(int64_t num_rows, int64_t num_groups, int64_t group)
      : num_groups(num_groups),
        group(group),
        numbers(num_rows * num_groups * group),
        scales(num_rows * num_groups),
        offsets(num_rows * num_groups) {}

  // Rounds the values of one group, of which the last ones may be missing.
  template <class Value>
  void take(const Value* from, int64_t count, int64_t number) {
    Floats values[128 / kLanes];
    const int64_t num_vectors = group / kLanes;
    if (count == group) {
      for (int64_t v = 0; v < num_vectors; ++v) values[v] = load_floats(from + v * kLanes);
    } else {
      float padded[128] = {};
      read_floats(from, count, padded);
      std::memcpy(values, padded, group * sizeof(float));
    }
    Floats largest{}, not_finite{};
    for (int64_t v = 0; v < num_vectors; ++v) {
      largest = max(largest, max(values[v], -values[v]));
      not_finite += values[v] - values[v];
    }
    const float maximum = max_of_lanes(largest), poison = sum_of_lanes(not_finite);
    int8_t* to = numbers.data() + number * group;
    if (poison != 0) {  // NaN
      std::memset(to, 0, group);
      offsets[number] = 0;
      scales[number] = poison;
      return;
    }
    const float inverse = maximum > 0 ? 127 / maximum : 0;
    constexpr float kRounder = 12582912.f;
    Ints sum{};
    for (int64_t v = 0; v < num_vectors; ++v) {
      const Ints rounded = (Ints)(values[v] * inverse + kRounder) - 0x4B400000;
      sum += rounded;
      store(to + v * kLanes, __builtin_convertvector(rounded, Bytes));
    }
    scales[number] = maximum / 127;
    offsets[number] = -kMiddle * _mm512_reduce_add_epi32((__m512i)sum);
  }
};

// sums[row][v] of kOf vectors of a panel's outputs, from `first_vector` on, for kRows rows from `first_row` on.
template <int kRows, int kOf, int kLoads>
inline void multiply_groups(const RoundedRows& x, int64_t first_row, const uint8_t* panel, int first_vector,
                            Floats (&sums)[kRows][kOf]) {
  constexpr int64_t kGroup = kLoads * kInputsOfLoad, kVectorBytes = kGroup * kLanes / 2;
  const int64_t num_groups = x.num_groups;
  const __m512i low = _mm512_set1_epi8(15);
  for (auto& row : sums)
    for (auto& sum : row) sum = Floats{};
  for (int64_t group = 0; group < num_groups; ++group, panel += kVectors * kVectorBytes + kScaleBytes) {
    const int8_t* numbers = x.numbers.data() + (first_row * num_groups + group) * kGroup;
    const int64_t at = first_row * num_groups + group;
    __m512i products[kRows][kOf];
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kOf; ++v) products[row][v] = _mm512_set1_epi32(x.offsets[at + row * num_groups]);
    for (int part = 0; part < kLoads; ++part) {
      __m512i first[kOf], second[kOf];
      for (int v = 0; v < kOf; ++v) {
        const __m512i both = _mm512_loadu_si512(panel + (first_vector + v) * kVectorBytes + part * 64);
        first[v] = _mm512_and_si512(both, low);
        second[v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      }
      for (int row = 0; row < kRows; ++row) {
        const int8_t* inputs = numbers + row * num_groups * kGroup + part * kInputsOfLoad;
        const __m512i here = _mm512_set1_epi32(load<int32_t>(inputs)), there = _mm512_set1_epi32(load<int32_t>(inputs + 4));
        for (int v = 0; v < kOf; ++v) {
          products[row][v] = _mm512_dpbusd_epi32(products[row][v], first[v], here);
          products[row][v] = _mm512_dpbusd_epi32(products[row][v], second[v], there);
        }
      }
    }
    const uint8_t* scales = panel + kVectors * kVectorBytes + first_vector * kLanes * sizeof(uint16_t);
    for (int v = 0; v < kOf; ++v) {
      const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)scales + v));
      for (int row = 0; row < kRows; ++row)
        sums[row][v] = (Floats)_mm512_fmadd_ps(_mm512_cvtepi32_ps(products[row][v]),
                                               _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at + row * num_groups])),
                                               (__m512)sums[row][v]);
    }
  }
}

template <class Output, int kLoads, int kRows>
void run_rows(const RoundedRows& x, const uint8_t* panel, int64_t first_row, int64_t first_output,
              const Finish<Output>& finish) {
  constexpr int kOf = kRows <= kRowsOfWholePanels ? kVectors : 1;
  for (int vector = 0; vector < kVectors; vector += kOf) {
    Floats sums[kRows][kOf];
    multiply_groups<kRows, kOf, kLoads>(x, first_row, panel, vector, sums);
    for (int v = 0; v < kOf; ++v) {
      const int64_t first = first_output + (vector + v) * kLanes;
      const int64_t count = std::min<int64_t>(kLanes, finish.out_features - first);
      if (count <= 0) return;
      for (int row = 0; row < kRows; ++row) finish(sums[row][v], first_row + row, first, count);
    }
  }
}

// `run_rows` for 1, 2, … rows.
template <class Output, int kLoads, int... kRows>
constexpr auto rows_functions(std::integer_sequence<int, kRows...>) {
  return std::array{&run_rows<Output, kLoads, kRows + 1>...};
}

struct ByRows {
  static constexpr int64_t kRowsOfItem = 64;
};

template <class Output, int kLoads>
void run(const Linear& linear, const RoundedRows& x, int64_t num_rows, const Finish<Output>& finish) {
  constexpr auto by_rows = rows_functions<Output, kLoads>(std::make_integer_sequence<int, kRowsAtOnce>{});
  const auto* panels = linear.panels.const_data_ptr<uint8_t>();
  const int64_t panel_size = linear.panels.stride(0);
  for_each_panel<ByRows>(linear.panels.size(0), num_rows, x.num_groups * x.group / 4,
                         [&](ByRows&, int64_t panel, int64_t first, int64_t count) {
                           const int64_t num_parts = (count + kRowsAtOnce - 1) / kRowsAtOnce;  // as equal as can be
                           for (int64_t part = 0; part < num_parts; ++part) {
                             const int64_t low = count * part / num_parts, high = count * (part + 1) / num_parts;
                             by_rows[high - low - 1](x, panels + panel * panel_size, first + low,
                                                     panel * kPanelOutputs, finish);
                           }
                         });
}

template <class Value>
void run_for(const Linear& linear, const at::Tensor& x, at::Tensor& output) {
  const int64_t in = linear.in_features, num_rows = x.numel() / in, num_groups = linear.panels.size(1);
  const at::Tensor rows = x.contiguous();
  RoundedRows rounded(num_rows, num_groups, group_size(linear));
  at::parallel_for(0, num_rows * num_groups, 512, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const int64_t row = number / num_groups, first = number % num_groups * rounded.group;
      rounded.take(rows.const_data_ptr<Value>() + row * in + first, std::min(rounded.group, in - first), number);
    }
  });
  const Finish<Value> finish{linear, nullptr, output};
  switch (rounded.group) {
    case 32: return run<Value, 4>(linear, rounded, num_rows, finish);
    case 64: return run<Value, 8>(linear, rounded, num_rows, finish);
    default: return run<Value, 16>(linear, rounded, num_rows, finish);
  }
}

#endif

}  // namespace

void check_four_bits(const Linear& linear) {
  const at::Tensor& panels = linear.panels;
  check_whole(panels, "panels", 3, at::kByte);
  const int64_t group = group_size(linear);
  TORCH_CHECK((group == 32 || group == 64 || group == 128) && panels.size(2) == group * kBytesOfInput + kScaleBytes,
              "a group of panels of four bits cannot have ", panels.size(2), " bytes");
  TORCH_CHECK(linear.in_features > 0 && linear.out_features > 0, "a layer must have inputs and outputs");
  check_size(panels, "panels", 0, (linear.out_features + kPanelOutputs - 1) / kPanelOutputs);
  check_size(panels, "panels", 1, (linear.in_features + group - 1) / group);
  TORCH_CHECK(!linear.scales, "panels of int8, and no others, have scales");
}

void run_four_bits(const Linear& linear, const at::Tensor& x, at::Tensor& output) {
#ifdef __AVX512VNNI__
  if (x.scalar_type() == at::kFloat) return run_for<float>(linear, x, output);
  if (x.scalar_type() == at::kBFloat16) return run_for<at::BFloat16>(linear, x, output);
#endif
  TORCH_CHECK(false, "this CPU has no instructions for layers of four bits and activations of ", x.scalar_type());
}

}  // namespace inflight
