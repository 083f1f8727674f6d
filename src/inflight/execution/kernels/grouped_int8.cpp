// Quantized weights times int8 activations: integer sums within a chunk, then scaled. Few rows go through a whole
// panel, which is then one stream of memory. An output is one sum over the inputs in ascending order, on any thread and
// beside any rows.
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "grouped_linear.h"
#include "grouped_panel.h"

namespace inflight {

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)

namespace {

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

// All numbers that it tells apart, as bits.
template <class Kind>
constexpr int kBitsOfProducts = 4;

#elif defined(__AVX2__)

template <class Kind>
constexpr int kBitsOfProducts = Kind::kIsWide ? 8 : Kind::kBits;

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

template <class Kind>
constexpr int kBitsOfProducts = Kind::kIsWide ? 8 : 4;

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
  std::vector<float> sums;       // [rows, chunks, parts], of the rounded values; parts as `fine` scales, at least one
  int64_t num_parts;

  RoundedRows(int64_t num_rows, int64_t num_chunks, int64_t num_parts)
      : num_chunks(num_chunks),
        numbers(num_rows * num_chunks * kChunk),
        scales(num_rows * num_chunks),
        offsets(num_rows * num_chunks),
        halves(num_rows * num_chunks * 2),
        sums(num_rows * num_chunks * num_parts),
        num_parts(num_parts) {}

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
      scales[number] = std::numeric_limits<float>::quiet_NaN();
      std::fill_n(&sums[num_parts * number], num_parts, scales[number]);
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
    for (int64_t part = 0; part < num_parts; ++part)
      sums[num_parts * number + part] = float(num_parts == 2 ? sums_of_halves[part] : sum) * scales[number];
  }
};

// Traits of a kind, for products with unpacked numbers.
template <int kParts_, bool kMinima_, int kBits_>
struct UnpackedKind {
  static constexpr int kParts = kParts_, kBits = kBits_;
  static constexpr bool kMinima = kMinima_, kIsWide = kBits == 8;
};
template <class Kind>
using UnpackedOf = UnpackedKind<Kind::kParts, Kind::kMinima, kBitsOfProducts<Kind>>;

// For many rows: a few unpacked chunks, in the L1 cache.
struct UnpackedChunk {
  Quads quads[kChunk / 4][kVectors];
  Floats scales[2][kVectors], minima[2][kVectors];
};
constexpr int64_t kMaxUnpacked = 16;

template <class Kind>
[[gnu::flatten]] void unpack_chunks(PanelReader& reader, UnpackedChunk* to, int64_t num_chunks) {
  FromPanel<Kind> from(reader);
  for (UnpackedChunk* end = to + num_chunks; to < end; ++to, from.end_chunk()) {
    from.begin_chunk(0, kVectors);
    for (int v = 0; v < kVectors; ++v) {
      for (int eight = 0; eight < kChunk / 8; ++eight)
        from.read(v, eight, to->quads[2 * eight][v], to->quads[2 * eight + 1][v]);
      for (int part = 0; part < Kind::kParts; ++part) {
        to->scales[part][v] = from.scale(v, part);
        if constexpr (Kind::kMinima) to->minima[part][v] = from.minimum(v, part);
      }
    }
  }
  reader = from;
}

template <class Kind>
struct FromUnpacked {
  const UnpackedChunk* at;
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
  Floats minimum(int vector, int part) const { return at->minima[part][vector]; }
};

// Whether prefetching within a panel is faster for few rows. Intel's processors gain half; AMD's prefetch by
// themselves, and lose.
inline bool gains_from_reading_ahead() {
#ifdef __x86_64__
  static const bool is_intel = __builtin_cpu_is("intel");
  return is_intel;
#else
  return false;
#endif
}

constexpr int64_t kRowsWorthUnpacking = 24;
constexpr int64_t kRowsWorthPrefetching = 4;  // that take long enough to prefetch the next panel
template <class Kind>
constexpr int kRowsAtOnceOf = Kind::kIsWide && kLanes == 8 ? 3 : 6;  // for which there are registers,
template <class Kind>
constexpr int kPackedRowsAtOnce = kLanes == 16 ? 4 : kRowsAtOnceOf<Kind>;  // or for this many, if numbers are unpacked meanwhile
template <class Kind>
constexpr int kVectorsAtOnce(int num_rows) {
  return kLanes == 16 || num_rows == 1 ? kVectors : num_rows <= 3 && !Kind::kIsWide ? 2 : 1;
}

// A chunk's inputs that share a scale.
template <class Kind, int kPart, int kRows, int kAtOnce, class From>
inline void add_part(const From& from, int base, const RoundedRows& x, int64_t at, Floats (&sums)[kRows][kAtOnce]) {
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

// Adds to sums[row] the products of some chunks. In `x` the first one of the first row has the number `first_at`.
template <class Kind, int kRows, class From>
[[gnu::flatten]] void add_chunks(const From& first, int64_t num_chunks, const RoundedRows& x, int64_t first_at,
                                 float (*sums)[kPanelOutputs]) {
  constexpr int kAtOnce = kVectorsAtOnce<Kind>(kRows);
  for (int base = 0; base < kVectors; base += kAtOnce) {
    From from = first;
    Floats own[kRows][kAtOnce];
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kAtOnce; ++v) own[row][v] = load<Floats>(&sums[row][(base + v) * kLanes]);
    for (int64_t at = first_at; at < first_at + num_chunks; ++at, from.end_chunk()) {
      from.begin_chunk(base, kAtOnce);
      add_part<Kind, 0>(from, base, x, at, own);
      if constexpr (Kind::kParts == 2) add_part<Kind, 1>(from, base, x, at, own);
      if constexpr (Kind::kMinima)
        for (int part = 0; part < Kind::kParts; ++part)
          for (int v = 0; v < kAtOnce; ++v) {
            const Floats minimum = from.minimum(base + v, part);
            for (int row = 0; row < kRows; ++row) {
              const int64_t number = (at + row * x.num_chunks) * Kind::kParts + part;
              own[row][v] = fused(-minimum, broadcast(x.sums[number]), own[row][v]);
            }
          }
    }
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kAtOnce; ++v) store(&sums[row][(base + v) * kLanes], own[row][v]);
  }
}

template <class Kind, class From, int... kRows>
constexpr auto by_rows(std::integer_sequence<int, kRows...>) {
  return std::array{&add_chunks<Kind, kRows + 1, From>...};
}

// Some rows and a panel, whose sums are made.
struct PanelRun {
  const RoundedRows& x;
  int64_t first_row, count, next_bytes_of_chunk;
  float (*sums)[kPanelOutputs];

  // Adds the products of some chunks for all rows, prefetching as many chunks of the next panel.
  template <class Kind, int kMaxRows, class From>
  void add_all(From from, int64_t num_chunks, int64_t chunk, const uint8_t* next) const {
    static constexpr auto functions = by_rows<Kind, From>(std::make_integer_sequence<int, kMaxRows>{});
    for_each_group(count, kMaxRows, [&](const RowGroup& group) {
      if (count >= kRowsWorthPrefetching) from.ahead = {next, num_chunks * next_bytes_of_chunk, num_chunks, group};
      functions[group.count - 1](from, num_chunks, x, (first_row + group.first) * x.num_chunks + chunk,
                                 sums + group.first);
    });
  }
};

// Fills the sums of rows and a panel of a kind.
template <class Kind>
void run_panel(PanelReader from, const PanelRun& run, UnpackedChunk* unpacked) {
  const int64_t num_chunks = run.x.num_chunks;
  const uint8_t* next = from.at + from.layout->num_runs(num_chunks * kChunk) * from.layout->run_bytes();
  if (run.count <= kRowsWorthUnpacking)
    return run.add_all<Kind, kPackedRowsAtOnce<Kind>>(FromPanel<Kind>(from), num_chunks, 0, next);
  using Own = UnpackedOf<Kind>;
  for (int64_t chunk = 0; chunk < num_chunks; chunk += kMaxUnpacked) {
    const int64_t count = std::min(kMaxUnpacked, num_chunks - chunk);
    unpack_chunks<Kind>(from, unpacked, count);
    run.add_all<Own, kRowsAtOnceOf<Own>>(FromUnpacked<Own>{unpacked, {}}, count, chunk, next + chunk * kBytesOfChunk<Kind>);
  }
}

struct WholeNumbers {
  static constexpr int64_t kRowsOfItem = 128;
  UnpackedChunk unpacked[kMaxUnpacked];
  float sums[kRowsOfItem][kPanelOutputs];
};

using RunPanel = void (*)(PanelReader from, const PanelRun& run, UnpackedChunk* unpacked);

RunPanel run_panel_of(const Grouped& layout) {
  return with_kind(layout, [](auto kind) -> RunPanel {
    if constexpr (decltype(kind)::kReading == Reading::kFloat) return nullptr;  // they run in the exact arithmetic
    else return &run_panel<decltype(kind)>;
  });
}

template <class Value>
void run(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output) {
  const Grouped& layout = *linear.grouped;
  const int64_t in = linear.in_features, num_rows = x.numel() / in;
  const Tensor rows = x.contiguous();
  RoundedRows rounded(num_rows, layout.num_runs(in) * layout.chunks(), layout.fine == 2 ? 2 : 1);
  const int64_t num_chunks = rounded.num_chunks;
  for_each_range(num_rows * num_chunks, 512, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const int64_t first = number % num_chunks * kChunk, count = std::clamp<int64_t>(in - first, 0, kChunk);
      rounded.take(rows.const_data_ptr<Value>() + number / num_chunks * in + first, count, number, int(layout.middle));
    }
  });
  const auto* panels = linear.panels.const_data_ptr<uint8_t>();
  const Finish<Value> finish{linear, nullptr, additions, output};
  const RunPanel run_panel = run_panel_of(layout);
  for_each_panel<WholeNumbers>(linear.panels.size(0), num_rows, num_chunks * kChunk / 4,
                               [&](WholeNumbers& way, int64_t panel, int64_t first, int64_t count) {
                                 PanelReader from(layout, panels + panel * linear.panels.stride(0));
                                 if (count < kRowsWorthPrefetching && gains_from_reading_ahead()) from.read_ahead();
                                 std::memset(way.sums, 0, count * sizeof way.sums[0]);
                                 run_panel(from, {rounded, first, count, layout.chunk_bytes(), way.sums}, way.unpacked);
                                 finish.all(way.sums, first, count, panel * kPanelOutputs);
                               });
}

}  // namespace

bool supports_int8_activations() { return true; }

void run_int8(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output) {
  if (x.scalar_type() == kFloat) return run<float>(linear, x, additions, output);
  run<bfloat16>(linear, x, additions, output);
}

#else

bool supports_int8_activations() { return false; }

void run_int8(const Linear&, const Tensor&, const Additions&, Tensor&) {
  CHECK(false, "this CPU does not support int8 activations");
}

#endif

}  // namespace inflight
