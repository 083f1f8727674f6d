// Numbers are unpacked in registers: each is a shift and a mask away from the unsigned factor of a product of whole
// numbers, and a conversion and a product away from its value. Few rows go through a whole panel, which is then one
// stream of memory.
//
// An output is one sum over the inputs in ascending order, whatever thread computes it and whatever rows are beside it.
#include "grouped_linear.h"

#include <ATen/ops/empty.h>

#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "grouped.h"
#include "lanewise.h"

namespace inflight {
namespace {

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define INFLIGHT_WHOLE_NUMBERS
#endif

enum class Reading { kWhole, kLookedUp, kFloat };

// The layouts that there are kernels for: what the compiler must know of them.
template <int kBits_, int kFine_, bool kMinima_, Reading kReading_ = Reading::kWhole>
struct Kind {
  static constexpr int kBits = kBits_, kFine = kFine_;
  static constexpr bool kMinima = kMinima_;
  static constexpr Reading kReading = kReading_;
  static constexpr bool kIsWide = kBits == 8 || kReading == Reading::kLookedUp;  // whether numbers exceed 127
  static constexpr int kParts = kFine == 2 ? 2 : 1;  // of a chunk, each with a scale
};

// Calls `function` with the kind of a layout.
template <class Function>
void with_kind(const Grouped& layout, const Function& function) {
  const auto reading = layout.table() ? Reading::kLookedUp : layout.code == Code::kE4M3 ? Reading::kFloat : Reading::kWhole;
  const auto is = [&](int bits, int fine, bool minima, Reading own = Reading::kWhole) {
    return layout.bits == bits && layout.fine == fine && layout.minima == minima && reading == own;
  };
  if (is(4, 0, false)) return function(Kind<4, 0, false>{});
  if (is(4, 0, true)) return function(Kind<4, 0, true>{});
  if (is(4, 1, true)) return function(Kind<4, 1, true>{});
  if (is(5, 0, false)) return function(Kind<5, 0, false>{});
  if (is(5, 0, true)) return function(Kind<5, 0, true>{});
  if (is(5, 1, true)) return function(Kind<5, 1, true>{});
  if (is(6, 2, false)) return function(Kind<6, 2, false>{});
  if (is(8, 0, false)) return function(Kind<8, 0, false>{});
  if (is(8, 0, true)) return function(Kind<8, 0, true>{});
  if (is(4, 0, false, Reading::kLookedUp)) return function(Kind<4, 0, false, Reading::kLookedUp>{});
  if (is(4, 1, false, Reading::kLookedUp)) return function(Kind<4, 1, false, Reading::kLookedUp>{});
  if (is(8, 0, false, Reading::kFloat)) return function(Kind<8, 0, false, Reading::kFloat>{});
  TORCH_CHECK(false, "there is no kernel for ", layout.bits, " bits with ", layout.fine, " fine scales",
              layout.minima ? " and minima" : "");
}

// Four numbers of each lane's output.
struct Quads {
  Bits words;
};

// A table of sixteen bytes for `look_up`.
inline Bits spread(const uint8_t* table) {
  Bits spread{};
  for (int i = 0; table && i < int(sizeof spread); i += 16) std::memcpy(reinterpret_cast<char*>(&spread) + i, table, 16);
  return spread;
}

// For each byte of `numbers` its entry.
inline Bits look_up(Bits table, Bits numbers) {
#if defined(__AVX512BW__)
  return (Bits)_mm512_shuffle_epi8((__m512i)table, (__m512i)numbers);
#elif defined(__AVX2__)
  return (Bits)_mm256_shuffle_epi8((__m256i)table, (__m256i)numbers);
#elif defined(__ARM_NEON)
  return (Bits)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)numbers);
#else
  uint8_t bytes[sizeof numbers], entries[sizeof table];
  store(bytes, numbers);
  store(entries, table);
  for (uint8_t& byte : bytes) byte = entries[byte];
  return load<Bits>(bytes);
#endif
}

// A float of eight bits from each lane.
inline Floats read_e4m3(Bits codes) {
  const Bits magnitude = codes & 127;
  const Floats normal = (Floats)((magnitude << 20) + (120u << 23));
  const Floats subnormal = __builtin_convertvector((Ints)magnitude, Floats) * 0x1p-9f;
  return (Floats)((Bits)(magnitude < 8 ? subnormal : normal) | (codes & 128) << 24);
}

// The numbers of eight inputs, from `8 * part` on, for a vector of outputs: four in `first`, four in `second`. `numbers`
// are a chunk's.
template <class Kind>
inline void unpack(const uint8_t* numbers, Bits table, int vector, int part, Quads& first, Quads& second) {
  constexpr int kBits = Kind::kBits;
  const int output = vector * kLanes;
  const uint8_t* own = numbers + output / kOutputsOfQuads * (kOutputsOfQuads * kChunk * kBits / 8) +
                       output % kOutputsOfQuads * 4;
  if constexpr (kBits == 8) {
    first.words = load<Bits>(own + part * 128);
    second.words = load<Bits>(own + part * 128 + 64);
    return;
  }
  constexpr uint32_t kLow = 0x0f0f0f0f;
  const Bits both = load<Bits>(own + part * 64);
  first.words = both & kLow;
  second.words = (both >> 4) & kLow;
  if constexpr (kBits == 5) {
    const Bits high = load<Bits>(own + 256);
    const int bit = 2 * part;
    first.words |= (bit < 4 ? high << (4 - bit) : high >> (bit - 4)) & 0x10101010;
    second.words |= (bit < 3 ? high << (3 - bit) : high >> (bit - 3)) & 0x10101010;
  }
  if constexpr (kBits == 6) {
    const Bits high = load<Bits>(own + 256 + part / 2 * 64);
    const int bit = part % 2 * 4;
    first.words |= (bit == 0 ? high << 4 : high) & 0x30303030;
    second.words |= (bit == 0 ? high << 2 : high >> 2) & 0x30303030;
  }
  if constexpr (Kind::kReading == Reading::kLookedUp) {
    first.words = look_up(table, first.words);
    second.words = look_up(table, second.words);
  }
}

inline Floats load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  float lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = load<at::Half>(from + 2 * lane);
  return load<Floats>(lanes);
#endif
}

// The coarse scale and minimum of a vector of outputs, and what a chunk makes of them.
template <class Kind>
struct Scales {
  Floats scale, minimum;

  Scales() = default;
  Scales(const Grouped& layout, const uint8_t* run, int vector) : minimum{} {
    if (layout.scale_bytes == 4) {
      scale = load<Floats>(run + 4 * vector * kLanes);
      if constexpr (Kind::kMinima) minimum = load<Floats>(run + 4 * (kPanelOutputs + vector * kLanes));
    } else {
      scale = load_halves(run + 2 * vector * kLanes);
      if constexpr (Kind::kMinima) minimum = load_halves(run + 2 * (kPanelOutputs + vector * kLanes));
    }
  }
  Floats scale_of(const uint8_t* chunk, int vector, int part) const {
    if constexpr (Kind::kFine == 0) return scale;
    return scale * floats_of_bytes(chunk + part * kPanelOutputs + vector * kLanes);
  }
  Floats minimum_of(const uint8_t* chunk, int vector) const {
    if constexpr (Kind::kFine == 0) return minimum;
    return minimum * floats_of_bytes(chunk + Kind::kFine * kPanelOutputs + vector * kLanes);
  }
};

template <class Kind>
constexpr int64_t kBytesOfChunk =
    kPanelOutputs * (Kind::kFine + (Kind::kMinima && Kind::kFine)) + kChunk * kChunk * Kind::kBits / 8;
template <class Kind>
constexpr int64_t kNumbersOfChunk = kPanelOutputs * (Kind::kFine + (Kind::kMinima && Kind::kFine));

// `run_rows` of a way for 1, 2, … rows.
template <class Way, int... kRows>
constexpr auto rows_functions(std::integer_sequence<int, kRows...>) {
  return std::array{&Way::template run_rows<kRows + 1>...};
}

// ------------------------------------------------------------------------------------------ the exact arithmetic

// A chunk's weights in the activations' dtype, as they lie in a plain panel.
template <class Kind, class Rows>
struct Expanded {
  using Stored = typename Rows::Stored;

  static void store_values(const Floats (&values)[4], Stored* to) {
    if constexpr (Rows::kPack == 1) {
      for (int i = 0; i < 4; ++i) store(to + i * kPanelOutputs, Rows::rounded(values[i]));
    } else {
      for (int i = 0; i < 4; i += 2)
        store(to + i * kPanelOutputs, widened(values[i]) | widened(values[i + 1]) << 16);
    }
  }
  // In bfloat16.
  static Bits widened(Floats values) {
#ifdef __AVX512BF16__
    return (Bits)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
    return bfloat16_of(values);
#endif
  }

  // All inputs of the chunk of this number in a run.
  static void expand(const Grouped& layout, const uint8_t* run, int64_t number, Stored* to) {
    const uint8_t* chunk = run + layout.head_bytes() + number * kBytesOfChunk<Kind>;
    const uint8_t* numbers = chunk + kNumbersOfChunk<Kind>;
    const int middle = int(layout.middle);
    const Bits table = spread(layout.table());
    for (int v = 0; v < kVectors; ++v) {
      const Scales<Kind> scales(layout, run, v);
      const Floats minimum = scales.minimum_of(chunk, v);
      for (int part = 0; part < kChunk / 8; ++part) {
        const Floats scale = scales.scale_of(chunk, v, part * Kind::kParts / 4);
        Quads quads[2];
        unpack<Kind>(numbers, table, v, part, quads[0], quads[1]);
        for (int half = 0; half < 2; ++half) {
          Floats values[4];
          for (int i = 0; i < 4; ++i) {
            const Bits code = quads[half].words >> (8 * i) & 255;
            if constexpr (Kind::kReading == Reading::kFloat)
              values[i] = read_e4m3(code) * scale;
            else
              values[i] = __builtin_convertvector((Ints)code - middle, Floats) * scale;
            if constexpr (Kind::kMinima) values[i] -= minimum;
          }
          store_values(values, to + (part * 8 + half * 4) * kPanelOutputs + v * kLanes * Rows::kPack);
        }
      }
    }
  }

};

// Some chunks are expanded, in the L1 cache, and multiplied like a plain panel.
template <class Kind, class Rows>
struct Exact {
  using Unpacked = typename Rows::Unpacked;
  static constexpr int64_t kRowsOfItem = RowSums<Unpacked>::kMaxRows, kChunksOfPart = 4;

  alignas(64) typename Unpacked::Stored expanded[kChunksOfPart * kChunk * kPanelOutputs];
  RowSums<Unpacked> sums;

  void run_panel(const Grouped& layout, const typename Rows::Input* x, int64_t num_inputs, const uint8_t* panel,
                 int64_t first_row, int64_t count, int64_t first_output, const Finish<typename Rows::Value>& finish) {
    sums.clear(count);
    for (int64_t run = 0; run * layout.coarse < num_inputs; ++run, panel += layout.run_bytes()) {
      for (int64_t c = 0; c < layout.chunks(); c += kChunksOfPart) {
        const int64_t num_chunks = std::min(kChunksOfPart, layout.chunks() - c);
        for (int64_t i = 0; i < num_chunks; ++i)
          Expanded<Kind, Unpacked>::expand(layout, panel, c + i, expanded + i * kChunk * kPanelOutputs);
        sums.add(x + first_row * num_inputs + run * layout.coarse + c * kChunk, num_inputs, count, expanded,
                 num_chunks * kChunk / Unpacked::kPack);
      }
    }
    finish.all(sums.sums, first_row, count, first_output);
  }
};

template <class Rows>
void run_exact(const Linear& linear, const at::Tensor& x, at::Tensor& output) {
  using Value = typename Rows::Value;
  const Grouped& layout = *linear.grouped;
  const int64_t num_rows = x.numel() / linear.in_features;
  const int64_t num_inputs = layout.num_runs(linear.in_features) * layout.coarse;
  const at::Tensor rows = padded_rows<Rows>(x, num_inputs);
  const auto* values = static_cast<const typename Rows::Input*>(rows.const_data_ptr());
  const auto* panels = linear.panels.const_data_ptr<uint8_t>();
  const Finish<Value> finish{linear, nullptr, output};
  with_kind(layout, [&](auto kind) {
    using Way = Exact<decltype(kind), Rows>;
    for_each_panel<Way>(linear.panels.size(0), num_rows, num_inputs,
                        [&](Way& way, int64_t panel, int64_t first, int64_t count) {
                          way.run_panel(layout, values, num_inputs, panels + panel * linear.panels.stride(0), first,
                                        count, panel * kPanelOutputs, finish);
                        });
  });
}

// Writes the rows of a panel to `to` `[outputs, in]`.
template <class Kind, class Rows>
void expand_panel(const Grouped& layout, const uint8_t* panel, int64_t num_outputs, int64_t in_features,
                  typename Rows::Stored* to) {
  constexpr int64_t kPack = Rows::kPack;
  using Neighbours = std::array<typename Rows::Stored, kPack>;  // inputs that lie together
  alignas(64) typename Rows::Stored expanded[kChunk * kPanelOutputs];
  for (int64_t i = 0; i < in_features; i += kChunk) {
    if (i > 0 && i % layout.coarse == 0) panel += layout.run_bytes();
    Expanded<Kind, Rows>::expand(layout, panel, i % layout.coarse / kChunk, expanded);
    const int64_t count = std::min<int64_t>(kChunk, in_features - i);
    for (int64_t output = 0; output < num_outputs; ++output) {
      alignas(64) Neighbours row[kChunk / kPack];
      for (int64_t j = 0; j < kChunk / kPack; ++j)
        row[j] = load<Neighbours>(expanded + (j * kPanelOutputs + output) * kPack);
      std::memcpy(to + output * in_features + i, row, count * sizeof *to);
    }
  }
}

// --------------------------------------------------------------------------------------------- in whole numbers

#ifdef INFLIGHT_WHOLE_NUMBERS

// In each lane an offset, and the products of four unsigned numbers and four signed inputs, again and again. `settle` after
// `kMaxQuads` of them, and at the end.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

template <class Kind>
struct Products {
  static constexpr int kMaxQuads = kChunk / 4;
  Ints sum;

  void add(Quads weights, int32_t inputs) {
#ifdef __AVX512VNNI__
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights.words, _mm512_set1_epi32(inputs));
#else
    sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights.words, _mm256_set1_epi32(inputs));
#endif
  }
  void settle() {}
};

#elif defined(__AVX2__)

// The hardware adds two products in 16 bits: numbers of more than 7 bits are taken in two parts.
template <class Kind>
struct Products {
  static constexpr int kBits = Kind::kIsWide ? 4 : Kind::kBits;
  static constexpr int kMaxQuads = std::min(kChunk / 4, 32767 / (2 * 127 * ((1 << kBits) - 1)));
  Ints sum;
  Shorts low{}, high{};

  void add(Quads weights, int32_t inputs) {
    if constexpr (Kind::kIsWide) {
      low += products_of_bytes(weights.words & 0x0f0f0f0f, inputs);
      high += products_of_bytes(weights.words >> 4 & 0x0f0f0f0f, inputs);
    } else {
      low += products_of_bytes(weights.words, inputs);
    }
  }
  void settle() {
    constexpr int32_t kOnes = 0x00010001;
    sum += products_of_pairs(low, kOnes);
    low = Shorts{};
    if constexpr (!Kind::kIsWide) return;
    sum += products_of_pairs(high, kOnes) * 16;
    high = Shorts{};
  }
  static Shorts products_of_bytes(Bits weights, int32_t inputs) {
#ifdef __AVX512BW__
    return (Shorts)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(inputs));
#else
    return (Shorts)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(inputs));
#endif
  }
};

#else

// The hardware multiplies signed numbers: those of 8 bits are taken in two parts.
template <class Kind>
struct Products {
  static constexpr int kMaxQuads = kChunk / 4;
  Ints sum;

  void add(Quads weights, int32_t inputs) {
    const int8x16_t same = vreinterpretq_s8_s32(vdupq_n_s32(inputs));
    if constexpr (!Kind::kIsWide) {
      sum = (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights.words, same);
    } else {
      sum = (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)(weights.words & 0x0f0f0f0f), same);
      sum += 16 * (Ints)vdotq_s32(int32x4_t{}, (int8x16_t)(weights.words >> 4 & 0x0f0f0f0f), same);
    }
  }
  void settle() {}
};

#endif

inline int32_t sum_of(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  sums = _mm_hadd_epi32(sums, sums);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(sums, sums));
#else
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
#endif
}

inline float largest_of(Floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)v);
#else
  return max_of_lanes(v);
#endif
}

// Rows of activations, rounded by chunks.
struct RoundedRows {
  int64_t num_chunks;
  std::vector<int8_t> numbers;   // [rows, chunks, 32]
  std::vector<float> scales;     // [rows, chunks]; NaN for one that is not finite
  std::vector<int32_t> offsets;  // [rows, chunks], what makes up for the middle of the weights' numbers;
  std::vector<int32_t> halves;   // [rows, chunks, 2], the same for each half of a chunk
  std::vector<float> sums;       // [rows, chunks], of the rounded values

  RoundedRows(int64_t num_rows, int64_t num_chunks)
      : num_chunks(num_chunks),
        numbers(num_rows * num_chunks * kChunk),
        scales(num_rows * num_chunks),
        offsets(num_rows * num_chunks),
        halves(num_rows * num_chunks * 2),
        sums(num_rows * num_chunks) {}

  // Rounds the values of one chunk, of which the last ones may be missing.
  template <class Value>
  void take(const Value* from, int64_t count, int64_t number, int middle) {
    constexpr int kVectorsOfChunk = kChunk / kLanes;
    Floats values[kVectorsOfChunk];
    if (count == kChunk) {
      for (int v = 0; v < kVectorsOfChunk; ++v) values[v] = load_floats(from + v * kLanes);
    } else {
      float padded[kChunk] = {};
      read_floats(from, count, padded);
      std::memcpy(values, padded, sizeof values);
    }
    Floats largest{}, not_finite{};
    for (const Floats& each : values) {
      largest = max(largest, max(each, -each));
      not_finite += each - each;
    }
    int8_t* to = numbers.data() + number * kChunk;
    if (any(not_finite != 0)) {
      std::memset(to, 0, kChunk);
      offsets[number] = halves[2 * number] = halves[2 * number + 1] = 0;
      scales[number] = sums[number] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    const float maximum = largest_of(largest);
    const float inverse = maximum > 0 ? 127 / maximum : 0;
    constexpr float kRounder = 12582912.f;
    int32_t sums_of_halves[2] = {};
    for (int v = 0; v < kVectorsOfChunk; ++v) {
      const Ints rounded = (Ints)(values[v] * inverse + kRounder) - 0x4B400000;
      sums_of_halves[v * kLanes / (kChunk / 2)] += sum_of(rounded);
      store_bytes(rounded, to + v * kLanes);
    }
    scales[number] = maximum / 127;
    for (int half = 0; half < 2; ++half) halves[2 * number + half] = -middle * sums_of_halves[half];
    const int32_t sum = sums_of_halves[0] + sums_of_halves[1];
    offsets[number] = -middle * sum;
    sums[number] = float(sum) * scales[number];
  }
};

// Where the weights of a panel come from, chunk by chunk: from the panel itself,
template <class Kind>
struct FromPanel {
  const Grouped& layout;
  const uint8_t* at;
  NextPanel ahead;
  const Bits table = spread(layout.table());
  Scales<Kind> coarse[kVectors];
  int64_t chunks_left = 0;  // of a run

  FromPanel(const Grouped& layout, const uint8_t* panel) : layout(layout), at(panel) {}
  // Of vectors from `first` on.
  void begin_chunk(int first, int count) {
    if (chunks_left-- > 0) return;
    chunks_left = layout.chunks() - 1;
    for (int v = first; v < first + count; ++v) coarse[v] = {layout, at, v};
    at += layout.head_bytes();
  }
  void end_chunk() {
    at += kBytesOfChunk<Kind>;
    ahead.advance();
  }
  void read(int vector, int eight, Quads& first, Quads& second) const {
    unpack<Kind>(at + kNumbersOfChunk<Kind>, table, vector, eight, first, second);
  }
  Floats scale(int vector, int part) const { return coarse[vector].scale_of(at, vector, part); }
  Floats minimum(int vector) const { return coarse[vector].minimum_of(at, vector); }
};

// or, for many rows, from what was made of a few chunks, in the L1 cache.
template <class Kind>
struct Unpacked {
  static constexpr int64_t kMaxChunks = 16;
  struct Chunk {
    Quads quads[kChunk / 4][kVectors];
    Floats scales[Kind::kParts][kVectors], minima[kVectors];
  };
  Chunk chunks[kMaxChunks];

  [[gnu::flatten]] void take(FromPanel<Kind>& from, int64_t num_chunks) {
    for (Chunk* to = chunks; to < chunks + num_chunks; ++to, from.end_chunk()) {
      from.begin_chunk(0, kVectors);
      for (int v = 0; v < kVectors; ++v) {
        for (int eight = 0; eight < kChunk / 8; ++eight)
          from.read(v, eight, to->quads[2 * eight][v], to->quads[2 * eight + 1][v]);
        for (int part = 0; part < Kind::kParts; ++part) to->scales[part][v] = from.scale(v, part);
        if constexpr (Kind::kMinima) to->minima[v] = from.minimum(v);
      }
    }
  }
};

template <class Kind>
struct FromUnpacked {
  const typename Unpacked<Kind>::Chunk* at;
  NextPanel ahead;

  void begin_chunk(int, int) {}
  void end_chunk() {
    ++at;
    ahead.advance();
  }
  void read(int vector, int eight, Quads& first, Quads& second) const {
    first = at->quads[2 * eight][vector];
    second = at->quads[2 * eight + 1][vector];
  }
  Floats scale(int vector, int part) const { return at->scales[part][vector]; }
  Floats minimum(int vector) const { return at->minima[vector]; }
};

template <class Kind>
struct WholeNumbers {
  static constexpr int64_t kRowsOfItem = 128;
  static constexpr int kRowsAtOnce = Kind::kIsWide && kLanes == 8 ? 3 : 6;  // for which there are registers,
  static constexpr int kPackedRowsAtOnce = kLanes == 16 ? 4 : kRowsAtOnce;  // or for so many, if numbers are unpacked meanwhile
  static constexpr int64_t kRowsWorthUnpacking = 24;
  static constexpr int64_t kRowsWorthPrefetching = 4;  // with fewer, the processor sees by itself what comes next

  static constexpr int kVectorsAtOnce(int num_rows) { return kLanes == 16 || num_rows == 1 ? kVectors : num_rows <= 3 && !Kind::kIsWide ? 2 : 1; }

  Unpacked<Kind> unpacked;
  float sums[kRowsOfItem][kPanelOutputs];

  // Adds to sums[row] the products of some chunks. In `x` the first one of the first row has the number `first_at`.
  template <int kRows, class From>
  [[gnu::flatten]] static void add_chunks(const From& first, int64_t num_chunks, const RoundedRows& x, int64_t first_at,
                                          float (*sums)[kPanelOutputs]) {
    constexpr int kAtOnce = kVectorsAtOnce(kRows);
    for (int base = 0; base < kVectors; base += kAtOnce) {
      From from = first;
      Floats own[kRows][kAtOnce];
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < kAtOnce; ++v) own[row][v] = load<Floats>(&sums[row][(base + v) * kLanes]);
      for (int64_t at = first_at; at < first_at + num_chunks; ++at, from.end_chunk()) {
        from.begin_chunk(base, kAtOnce);
        add_part<0>(from, base, x, at, own);
        if constexpr (Kind::kParts == 2) add_part<1>(from, base, x, at, own);
        if constexpr (Kind::kMinima)
          for (int v = 0; v < kAtOnce; ++v) {
            const Floats minimum = from.minimum(base + v);
            for (int row = 0; row < kRows; ++row)
              own[row][v] = fused(-minimum, broadcast(x.sums[at + row * x.num_chunks]), own[row][v]);
          }
      }
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < kAtOnce; ++v) store(&sums[row][(base + v) * kLanes], own[row][v]);
    }
  }

  // A chunk's inputs that share a scale.
  template <int kPart, int kRows, int kAtOnce, class From>
  static inline void add_part(const From& from, int base, const RoundedRows& x, int64_t at,
                              Floats (&sums)[kRows][kAtOnce]) {
    constexpr int kLoads = kChunk / 8 / Kind::kParts;
    const int64_t num_chunks = x.num_chunks;
    Products<Kind> products[kRows][kAtOnce];
    for (int row = 0; row < kRows; ++row) {
      Ints offset{};
      if constexpr (!Kind::kMinima) {
        const int64_t number = at + row * num_chunks;
        offset += Kind::kParts == 2 ? x.halves[2 * number + kPart] : x.offsets[number];
      }
      for (int v = 0; v < kAtOnce; ++v) products[row][v] = {offset};
    }
    for (int i = 0; i < kLoads; ++i) {
      const int eight = kPart * kLoads + i;
      Quads first[kAtOnce], second[kAtOnce];
      for (int v = 0; v < kAtOnce; ++v) from.read(base + v, eight, first[v], second[v]);
      for (int row = 0; row < kRows; ++row) {
        const int8_t* inputs = x.numbers.data() + (at + row * num_chunks) * kChunk + eight * 8;
        for (int v = 0; v < kAtOnce; ++v) {
          products[row][v].add(first[v], load<int32_t>(inputs));
          products[row][v].add(second[v], load<int32_t>(inputs + 4));
          if ((2 * i + 2) % Products<Kind>::kMaxQuads == 0 || i == kLoads - 1) products[row][v].settle();
        }
      }
    }
    for (int v = 0; v < kAtOnce; ++v) {
      const Floats scale = from.scale(base + v, kPart);
      for (int row = 0; row < kRows; ++row)
        sums[row][v] = fused(__builtin_convertvector(products[row][v].sum, Floats),
                             scale * x.scales[at + row * num_chunks], sums[row][v]);
    }
  }

  template <class From, int... kRows>
  static constexpr auto by_rows(std::integer_sequence<int, kRows...>) {
    return std::array{&WholeNumbers::template add_chunks<kRows + 1, From>...};
  }

  // Adds the products of some chunks for all rows. Meanwhile as many chunks of the next panel come out of memory.
  template <int kMaxRows, class From>
  void add_all(From from, int64_t num_chunks, const RoundedRows& x, int64_t first_row, int64_t count, int64_t chunk,
               const uint8_t* next) {
    constexpr auto functions = by_rows<From>(std::make_integer_sequence<int, kMaxRows>{});
    for_each_group(count, kMaxRows, [&](const RowGroup& group) {
      if (count >= kRowsWorthPrefetching) from.ahead = {next, num_chunks * kBytesOfChunk<Kind>, num_chunks, group};
      functions[group.count - 1](from, num_chunks, x, (first_row + group.first) * x.num_chunks + chunk,
                                 sums + group.first);
    });
  }

  // Fills the sums of `count` rows.
  void run_panel(const Grouped& layout, const RoundedRows& x, const uint8_t* panel, int64_t first_row, int64_t count) {
    std::memset(sums, 0, count * sizeof sums[0]);
    FromPanel<Kind> from(layout, panel);
    const uint8_t* next = panel + layout.num_runs(x.num_chunks * kChunk) * layout.run_bytes();
    if (count <= kRowsWorthUnpacking)
      return add_all<kPackedRowsAtOnce>(from, x.num_chunks, x, first_row, count, 0, next);
    constexpr int64_t kMaxChunks = Unpacked<Kind>::kMaxChunks;
    for (int64_t chunk = 0; chunk < x.num_chunks; chunk += kMaxChunks) {
      const int64_t num_chunks = std::min(kMaxChunks, x.num_chunks - chunk);
      unpacked.take(from, num_chunks);
      add_all<kRowsAtOnce>(FromUnpacked<Kind>{unpacked.chunks}, num_chunks, x, first_row, count, chunk,
                           next + chunk * kBytesOfChunk<Kind>);
    }
  }
};

template <class Value>
void run_in_whole_numbers(const Linear& linear, const at::Tensor& x, at::Tensor& output) {
  const Grouped& layout = *linear.grouped;
  const int64_t in = linear.in_features, num_rows = x.numel() / in;
  const at::Tensor rows = x.contiguous();
  RoundedRows rounded(num_rows, layout.num_runs(in) * layout.chunks());
  const int64_t num_chunks = rounded.num_chunks;
  at::parallel_for(0, num_rows * num_chunks, 512, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const int64_t first = number % num_chunks * kChunk, count = std::clamp<int64_t>(in - first, 0, kChunk);
      rounded.take(rows.const_data_ptr<Value>() + number / num_chunks * in + first, count, number, int(layout.middle));
    }
  });
  const auto* panels = linear.panels.const_data_ptr<uint8_t>();
  const Finish<Value> finish{linear, nullptr, output};
  with_kind(layout, [&](auto kind) {
    if constexpr (decltype(kind)::kReading != Reading::kFloat) {
      using Way = WholeNumbers<decltype(kind)>;
      for_each_panel<Way>(linear.panels.size(0), num_rows, num_chunks * kChunk / 4,
                          [&](Way& way, int64_t panel, int64_t first, int64_t count) {
                            way.run_panel(layout, rounded, panels + panel * linear.panels.stride(0), first, count);
                            finish.all(way.sums, first, count, panel * kPanelOutputs);
                          });
    }
  });
}

#endif

}  // namespace

at::Tensor grouped_values(at::IntArrayRef words, const at::Tensor& panels, int64_t out_features, int64_t in_features,
                          at::ScalarType dtype) {
  const Grouped layout(words);
  check_grouped(layout, panels, out_features, in_features);
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "weights cannot be ", dtype);
  at::Tensor values = at::empty({out_features, in_features}, dtype);
  const auto fill = [&](auto rows) {
    using Rows = decltype(rows);
    auto* to = static_cast<typename Rows::Stored*>(values.data_ptr());
    with_kind(layout, [&](auto kind) {
      at::parallel_for(0, panels.size(0), 1 + 16384 / in_features, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
          const int64_t first = panel * kPanelOutputs;
          expand_panel<decltype(kind), Rows>(layout, panels.const_data_ptr<uint8_t>() + panel * panels.size(1),
                                             std::min<int64_t>(kPanelOutputs, out_features - first), in_features,
                                             to + first * in_features);
        }
      });
    });
  };
  if (dtype == at::kFloat) fill(Float32Rows{});
  else fill(BFloat16Rows{});
  return values;
}

bool multiplies_whole_numbers() {
#ifdef INFLIGHT_WHOLE_NUMBERS
  return true;
#else
  return false;
#endif
}

bool prefers_whole_numbers() {
#ifdef __AVX2__
  return true;
#else
  return false;  // with NEON never measured
#endif
}

void run_grouped(const Linear& linear, const at::Tensor& x, at::Tensor& output) {
  const bool is_float = x.scalar_type() == at::kFloat;
  TORCH_CHECK(is_float || x.scalar_type() == at::kBFloat16, "activations cannot be ", x.scalar_type());
#ifdef INFLIGHT_WHOLE_NUMBERS
  if (!linear.is_exact && linear.grouped->code != Code::kE4M3) {
    if (is_float) return run_in_whole_numbers<float>(linear, x, output);
    return run_in_whole_numbers<at::BFloat16>(linear, x, output);
  }
#endif
  if (is_float) return run_exact<Float32Rows>(linear, x, output);
  return run_exact<BFloat16Rows>(linear, x, output);
}

}  // namespace inflight
