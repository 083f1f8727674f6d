// Grouped weights, expanded to the activations' dtype and multiplied as in a plain panel.

#include <array>
#include <cstring>
#include <type_traits>

#include "grouped_linear.h"
#include "grouped_panel.h"
#include "tiles.h"

namespace inflight {
namespace {

// The values of a vector of outputs.
template <class Kind, class Rows>
struct Values {
  using Stored = typename Rows::Stored;
  Floats scale, minimum;
  int middle;

  Values(Floats scale, Floats minimum, int middle) : scale(scale), minimum(minimum), middle(middle) {}

  // Those of four inputs, to where they lie in a plain panel.
  void store_quads(Quads quads, Stored* to) const {
    Floats values[4];
    for (int i = 0; i < 4; ++i) {
      const Bits numbers = quads.words >> (8 * i) & 255;
      if constexpr (Kind::kReading == Reading::kFloat) values[i] = read_e4m3(numbers) * scale;
      else values[i] = __builtin_convertvector((Ints)numbers - middle, Floats) * scale;
      if constexpr (Kind::kMinima) values[i] -= minimum;
    }
    if constexpr (Rows::kPack == 1) {
      for (int i = 0; i < 4; ++i) store(to + i * kPanelOutputs, Rows::rounded(values[i]));
    } else {
      for (int i = 0; i < 4; i += 2)
        store(to + i * kPanelOutputs, bfloat16_of(values[i]) | bfloat16_of(values[i + 1]) << 16);
    }
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// Of the bytes in a vector of quads, those of two inputs, from 2 * `pair` on, of each of eight outputs, from 8 * `half` on:
// one in each lane.
template <int kPair, int kHalf>
inline Bits take_pairs(Bits above, Quads quads) {
  struct alignas(64) Places {
    uint8_t bytes[64] = {};
    constexpr Places() {
      for (int lane = 0; lane < 16; ++lane) bytes[4 * lane] = uint8_t(4 * (8 * kHalf + lane / 2) + 2 * kPair + lane % 2);
    }
  };
  static constexpr Places kPlaces;
  constexpr __mmask64 kLowest = 0x1111111111111111;
  return (Bits)_mm512_mask_permutexvar_epi8((__m512i)above, kLowest, _mm512_load_si512(&kPlaces), (__m512i)quads.words);
}

// Two inputs of an output lie side by side from the start, so that one instruction rounds them, and nothing moves after it.
template <class Kind>
struct Values<Kind, BFloat16Rows> {
  static constexpr uint32_t kTwoTo23 = 0x4B000000;  // a float whose lowest bits count ones
  Floats scales[2], minima[2], excess[2];

  Values(Floats scale, Floats minimum, int middle) {
    for (int half = 0; half < 2; ++half) {
      const Ints outputs = lane_numbers() / 2 + 8 * half;
      scales[half] = (Floats)_mm512_permutexvar_ps((__m512i)outputs, (__m512)scale);
      minima[half] = (Floats)_mm512_permutexvar_ps((__m512i)outputs, (__m512)minimum);
      excess[half] = Kind::kMinima ? scales[half] * 0x1p23f : broadcast(float(0x800000 + middle));
    }
  }

  void store_quads(Quads quads, uint16_t* to) const {
    store_pairs<0>(quads, to);
    store_pairs<1>(quads, to + 2 * kPanelOutputs);
  }

 private:
  template <int kPair>
  void store_pairs(Quads quads, uint16_t* to) const {
    store(to, _mm512_cvtne2ps_pbh((__m512)values<kPair, 1>(quads), (__m512)values<kPair, 0>(quads)));
  }

  template <int kPair, int kHalf>
  Floats values(Quads quads) const {
    if constexpr (Kind::kReading == Reading::kFloat)
      return read_e4m3(take_pairs<kPair, kHalf>(Bits{}, quads)) * scales[kHalf];
    const Floats values = (Floats)take_pairs<kPair, kHalf>(Bits{} + kTwoTo23, quads);
    if constexpr (!Kind::kMinima) return (values - excess[kHalf]) * scales[kHalf];
    return fused(values, scales[kHalf], -excess[kHalf]) - minima[kHalf];  // the product is rounded once
  }
};

#endif

// Writes some chunks' weights in the activations' dtype, as they lie in a plain panel.
template <class Kind, class Rows>
[[gnu::flatten]] void expand(PanelReader& reader, int64_t num_chunks, typename Rows::Stored* to) {
  FromPanel<Kind> from(reader);
  for (; num_chunks > 0; --num_chunks, to += kChunk * kPanelOutputs, from.end_chunk()) {
    from.begin_chunk(0, kVectors);
    for (int v = 0; v < kVectors; ++v) {
      for (int part = 0; part < Kind::kParts; ++part) {
        const Values<Kind, Rows> values(from.scale(v, part), from.minimum(v, part), int(from.layout->middle));
        for (int eight = part * 4 / Kind::kParts; eight < (part + 1) * 4 / Kind::kParts; ++eight) {
          Quads quads[2];
          from.read(v, eight, quads[0], quads[1]);
          for (int half = 0; half < 2; ++half)
            values.store_quads(quads[half], to + (eight * 8 + half * 4) * kPanelOutputs + v * kLanes * Rows::kPack);
        }
      }
    }
  }
  reader = from;
}

template <class Rows>
using Expand = void (*)(PanelReader& reader, int64_t num_chunks, typename Rows::Stored* to);

template <class Rows>
Expand<Rows> expand_of(const Grouped& layout) {
  return with_kind(layout, [](auto kind) -> Expand<Rows> { return &expand<decltype(kind), Rows>; });
}

// A part of a panel is expanded, in the L1 cache, and multiplied like a plain panel.
template <class Rows, class Sums>
struct Exact {
  using Unpacked = typename Rows::Unpacked;
  using Stored = typename Unpacked::Stored;
  static constexpr int64_t kRowsOfItem = Sums::kMaxRows;
  static constexpr int64_t kMaxChunks = 16384 / (kChunk * kPanelOutputs * sizeof(Stored));

  alignas(64) Stored weights[kMaxChunks * kChunk * kPanelOutputs];
  Sums sums;

  void run_panel(PanelReader from, Expand<Unpacked> expand, const typename Sums::Rows& rows, int64_t num_chunks,
                 int64_t first_row, int64_t count, int64_t first_output, const Finish<typename Rows::Value>& finish) {
    constexpr int64_t kSteps = kChunk / Unpacked::kPack;
    from.read_ahead();
    sums.clear(count);
    const int64_t at_once = count <= Sums::kRowsHeld ? 1 : kMaxChunks;
    for (int64_t chunk = 0; chunk < num_chunks; chunk += at_once) {
      const int64_t num = std::min(at_once, num_chunks - chunk);
      expand(from, num, weights);
      sums.add(rows, first_row, count, chunk * kSteps, weights, num * kSteps);
    }
    sums.settle();
    finish.all(sums.sums, first_row, count, first_output);
  }
};

template <class Rows>
void run_in(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output) {
  using Value = typename Rows::Value;
  using Unpacked = typename Rows::Unpacked;
#ifdef INFLIGHT_MATRIX_UNIT
  using Sums = std::conditional_t<std::is_same_v<Unpacked, BFloat16Rows>, TileSums<float>, RowSums<Unpacked>>;
#else
  using Sums = RowSums<Unpacked>;
#endif
  const Grouped& layout = *linear.grouped;
  const int64_t num_rows = x.numel() / linear.in_features;
  const int64_t num_inputs = layout.num_runs(linear.in_features) * layout.coarse;
  const Tensor padded = padded_rows<Rows>(x, num_inputs);
  const typename Sums::Rows rows(static_cast<const typename Rows::Input*>(padded.const_data_ptr()), num_rows,
                                 num_inputs / Unpacked::kPack);
  const auto* panels = linear.panels.const_data_ptr<uint8_t>();
  const Finish<Value> finish{linear, nullptr, additions, output};
  const Expand<Unpacked> expand = expand_of<Unpacked>(layout);
  using Way = Exact<Rows, Sums>;
  for_each_panel<Way>(linear.panels.size(0), num_rows, num_inputs,
                      [&](Way& way, int64_t panel, int64_t first, int64_t count) {
                        const PanelReader from(layout, panels + panel * linear.panels.stride(0));
                        way.run_panel(from, expand, rows, num_inputs / kChunk, first, count, panel * kPanelOutputs, finish);
                      });
}

// Writes the rows of a panel to `to` `[outputs, in]`.
template <class Rows>
void write_panel(PanelReader from, Expand<Rows> expand, int64_t num_outputs, int64_t in_features,
                 typename Rows::Stored* to) {
  constexpr int64_t kPack = Rows::kPack;
  using Neighbours = std::array<typename Rows::Stored, kPack>;  // inputs that lie together
  alignas(64) typename Rows::Stored weights[kChunk * kPanelOutputs];
  for (int64_t i = 0; i < in_features; i += kChunk) {
    expand(from, 1, weights);
    const int64_t count = std::min<int64_t>(kChunk, in_features - i);
    for (int64_t output = 0; output < num_outputs; ++output) {
      alignas(64) Neighbours row[kChunk / kPack];
      for (int64_t j = 0; j < kChunk / kPack; ++j)
        row[j] = load<Neighbours>(weights + (j * kPanelOutputs + output) * kPack);
      std::memcpy(to + output * in_features + i, row, count * sizeof *to);
    }
  }
}

}  // namespace

bool prefers_int8_activations() {
#ifdef __AVX2__
  return true;
#else
  return false;  // with NEON never measured
#endif
}

void run_grouped(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output) {
  const auto dtype = x.scalar_type();
  CHECK(dtype == kFloat || dtype == kBFloat16, "activations cannot be ", dtype);
  const bool is_exact = linear.is_exact || linear.grouped->code == Code::kE4M3 || !supports_int8_activations();
  is_exact ? run_exact(linear, x, additions, output) : run_int8(linear, x, additions, output);
}

void run_exact(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output) {
  if (x.scalar_type() == kFloat) return run_in<Float32Rows>(linear, x, additions, output);
  run_in<BFloat16Rows>(linear, x, additions, output);
}

Tensor grouped_values(Sizes words, const Tensor& panels, int64_t out_features, int64_t in_features,
                          ScalarType dtype) {
  const Grouped layout(words);
  check_grouped(layout, panels, out_features, in_features);
  CHECK(dtype == kFloat || dtype == kBFloat16, "weights cannot be ", dtype);
  Tensor values = empty({out_features, in_features}, dtype);
  const auto fill = [&](auto rows) {
    using Rows = decltype(rows);
    auto* to = static_cast<typename Rows::Stored*>(values.data_ptr());
    const Expand<Rows> expand = expand_of<Rows>(layout);
    for_each_range(panels.size(0), 1 + 16384 / in_features, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t first = panel * kPanelOutputs;
        const PanelReader from(layout, panels.const_data_ptr<uint8_t>() + panel * panels.size(1));
        write_panel<Rows>(from, expand, std::min<int64_t>(kPanelOutputs, out_features - first), in_features,
                          to + first * in_features);
      }
    });
  };
  if (dtype == kFloat) fill(Float32Rows{});
  else fill(BFloat16Rows{});
  return values;
}

}  // namespace inflight
