// Reading a grouped panel, chunk by chunk, in registers. A shift and a mask give the unsigned factor of an integer
// product; a conversion and a product more give the value.
#pragma once

#include <cstring>

#include "grouped.h"
#include "lanewise.h"

namespace inflight {

enum class Reading { kWhole, kLookedUp, kFloat };

// The supported layouts, as compile-time kinds.
template <int kBits_, int kFine_, bool kMinima_, Reading kReading_ = Reading::kWhole>
struct Kind {
  static constexpr int kBits = kBits_, kFine = kFine_;
  static constexpr bool kMinima = kMinima_;
  static constexpr Reading kReading = kReading_;
  static constexpr bool kIsWide = kBits == 8 || kReading == Reading::kLookedUp;  // whether numbers exceed 127
  static constexpr int kParts = kFine == 2 ? 2 : 1;  // of a chunk, each with a scale
};

// Calls `function` with the kind of a layout, and returns its result.
template <class Function>
auto with_kind(const Grouped& layout, const Function& function) {
  const auto reading = layout.table() ? Reading::kLookedUp : layout.code == Code::kE4M3 ? Reading::kFloat : Reading::kWhole;
  const auto is = [&](int bits, int fine, bool minima, Reading own = Reading::kWhole) {
    return layout.bits == bits && layout.fine == fine && layout.minima == minima && reading == own;
  };
  if (is(2, 0, false)) return function(Kind<2, 0, false>{});
  if (is(2, 0, true)) return function(Kind<2, 0, true>{});
  if (is(2, 2, true)) return function(Kind<2, 2, true>{});
  if (is(3, 0, false)) return function(Kind<3, 0, false>{});
  if (is(3, 0, true)) return function(Kind<3, 0, true>{});
  if (is(3, 2, false)) return function(Kind<3, 2, false>{});
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
  if (is(4, 2, false, Reading::kLookedUp)) return function(Kind<4, 2, false, Reading::kLookedUp>{});
  if (is(8, 0, false, Reading::kFloat)) return function(Kind<8, 0, false, Reading::kFloat>{});
  fail("there is no kernel for ", layout.bits, " bits with ", layout.fine, " fine scales",
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
  if constexpr (kBits < 4) {
    const Bits four = load<Bits>(own + part / 2 * 64) >> part % 2 * 4;
    first.words = four & 0x03030303;
    second.words = (four >> 2) & 0x03030303;
    if constexpr (kBits == 3) {
      const Bits high = load<Bits>(own + 128) >> 2 * part;
      first.words |= (high << 2) & 0x04040404;
      second.words |= (high << 1) & 0x04040404;
    }
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
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = load<float16>(from + 2 * lane);
  return load<Floats>(lanes);
#endif
}

template <class Kind>
constexpr int64_t kNumbersOfChunk = kPanelOutputs * Kind::kFine * (Kind::kMinima ? 2 : 1);  // where they begin
template <class Kind>
constexpr int64_t kBytesOfChunk = kNumbersOfChunk<Kind> + kChunk * kChunk * Kind::kBits / 8;

// The position in a panel, common to all kinds.
struct PanelReader {
  const Grouped* layout;
  const uint8_t* at;
  NextPanel ahead;
  Bits table;
  Floats scales[kVectors], minima[kVectors];  // coarse ones
  int64_t chunks_left = 0;                    // of a run

  PanelReader(const Grouped& layout, const uint8_t* panel) : layout(&layout), at(panel), table(spread(layout.table())) {}
  // From now on each chunk prefetches another one: the computation takes too long for the hardware prefetcher to look
  // that far ahead.
  void read_ahead() {
    ahead.at = reinterpret_cast<const char*>(at) + 4096;
    ahead.bytes_of_step = layout->chunk_bytes();
  }
};

template <class Kind>
struct FromPanel : PanelReader {
  explicit FromPanel(const PanelReader& reader) : PanelReader(reader) {}

  // Of vectors from `first` on.
  void begin_chunk(int first, int count) {
    if (chunks_left-- > 0) return;
    chunks_left = layout->chunks() - 1;
    for (int v = first; v < first + count; ++v) {
      scales[v] = load_scales(v * kLanes);
      minima[v] = Kind::kMinima ? load_scales(kPanelOutputs + v * kLanes) : Floats{};
    }
    at += layout->head_bytes();
  }
  void end_chunk() {
    at += kBytesOfChunk<Kind>;
    ahead.advance();
  }
  void read(int vector, int eight, Quads& first, Quads& second) const {
    unpack<Kind>(at + kNumbersOfChunk<Kind>, table, vector, eight, first, second);
  }
  Floats scale(int vector, int part) const {
    if constexpr (Kind::kFine == 0) return scales[vector];
    return scales[vector] * floats_of_bytes(at + part * kPanelOutputs + vector * kLanes);
  }
  Floats minimum(int vector, int part) const {
    if constexpr (Kind::kFine == 0) return minima[vector];
    return minima[vector] * floats_of_bytes(at + (Kind::kFine + part) * kPanelOutputs + vector * kLanes);
  }

 private:
  Floats load_scales(int64_t number) const {
    return layout->scale_bytes == 4 ? load<Floats>(at + 4 * number) : load_halves(at + 2 * number);
  }
};

}  // namespace inflight
