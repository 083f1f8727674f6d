// The layout of grouped quantized weights in panels. A weight is `(number - middle) * scale`, or `number * scale -
// minimum`; a number may be a code. Inputs come in chunks of 32; consecutive chunks share a coarse scale (and a coarse
// minimum). With fine scales, integers, a chunk or each half of it has its own, and its scale is the product of both.
//
// For each such run of chunks a panel has, for its 32 outputs side by side: the coarse scales in float16 or float32; the
// coarse minima likewise; and for each chunk the fine scales in int8, the fine minima in int8, and the numbers. Of these come
// first all of sixteen outputs, then of the others, eight inputs after the other, each time for every output: four bytes
// with the first four inputs in their low halves and the others in their high halves. The fifth bits of all, or the fifth
// and sixth, follow, in bytes that lie in the same way: from the lowest bits up those of the first four inputs, of the
// next four, and so on. Numbers of eight bits have a whole byte each. Of two and three bits, a byte has those of four
// inputs, each four further; the third bits follow like the fifth.
#pragma once

#include "tensor.h"

#include <cstring>
#include <optional>

namespace inflight {

constexpr int kChunk = 32;          // inputs
constexpr int kOutputsOfQuads = 16;  // whose numbers lie side by side

// What a number stands for.
enum class Code : int64_t {
  kWhole,      // itself
  kE4M3,       // a float of eight bits, `float8_e4m3fn`, which is not NaN
  kE2M1,       // of the sixteen floats of four bits, twice each, around 12
  kNonlinear,  // of the sixteen values of GGUF's IQ4_NL, around 128,
  kLattice2,   // of IQ2 (plus or minus 8, 25, 43) and IQ1 (1, 7, 9), around 64,
  kLattice3,   // of IQ3_XXS (plus or minus 4, 12, …, 52, 62), around 64,
  kOdd,        // of IQ3_S: the odd numbers from -15 to 15, around 16
};

struct Grouped {
  int64_t bits;    // of a number: 2 to 6, or 8
  int64_t coarse;  // inputs that share a coarse scale, a multiple of 32
  int64_t fine;    // fine scales of a chunk: 0, 1 or 2
  bool minima;
  int64_t middle;  // of what the numbers stand for
  int64_t scale_bytes;  // of a coarse scale, or a minimum: 2 or 4
  Code code;

  // From these seven, in this order. Refuses what no kernel reads.
  explicit Grouped(Sizes layout);

  // Of a number, which lie apart from the others: its lowest two or four, or all eight.
  int64_t low_bits() const { return bits == 8 ? 8 : bits < 4 ? 2 : 4; }
  // The lookup table of sixteen numbers; else nullptr.
  const uint8_t* table() const;

  int64_t chunks() const { return coarse / kChunk; }
  int64_t fine_bytes() const { return kChunk * fine; }
  int64_t minima_bytes() const { return minima ? fine_bytes() : 0; }
  int64_t head_bytes() const { return scale_bytes * kChunk * (minima ? 2 : 1); }
  int64_t chunk_bytes() const { return fine_bytes() + minima_bytes() + kChunk * kChunk * bits / 8; }
  int64_t run_bytes() const { return head_bytes() + chunks() * chunk_bytes(); }
  int64_t num_runs(int64_t in_features) const { return (in_features + coarse - 1) / coarse; }
};

// Writes the numbers of a chunk's 32 inputs for one output to their places in the chunk.
template <int kBits>
void write_numbers(uint8_t* to, int64_t output, const uint8_t* numbers) {
  constexpr int64_t kOfOutputs = kOutputsOfQuads * kChunk * kBits / 8;
  uint8_t* own = to + output / kOutputsOfQuads * kOfOutputs + output % kOutputsOfQuads * 4;
  constexpr int kQuads = kChunk / 4, kLow = kBits < 4 ? 2 : 4;
  uint32_t quads[kQuads], high[2] = {};
  const auto store = [&](int64_t place, uint32_t quad) { std::memcpy(own + place, &quad, sizeof quad); };
  std::memcpy(quads, numbers, sizeof quads);
  for (int quad = 0; quad < kQuads; ++quad) {
    if (kBits == 8) store(quad * 64, quads[quad]);
    if (kBits == kLow + 1) high[0] |= (quads[quad] >> kLow & 0x01010101) << quad;
    if (kBits == 6) high[quad / 4] |= (quads[quad] >> 4 & 0x03030303) << quad % 4 * 2;
  }
  if (kBits == 8) return;
  constexpr int kInByte = 8 / kLow;
  for (int quad = 0; quad < kQuads; quad += kInByte) {
    uint32_t bytes = 0;
    for (int i = 0; i < kInByte; ++i) bytes |= (quads[quad + i] & 0x01010101 * ((1 << kLow) - 1)) << i * kLow;
    store(quad / kInByte * 64, bytes);
  }
  for (int part = 0; part < kBits - kLow; ++part) store(kLow * 64 + part * 64, high[part]);
}
void write_numbers(const Grouped& layout, uint8_t* to, int64_t output, const uint8_t* numbers);

// Refuses panels that are not `[out / 32, runs * run_bytes]` uint8 for a weight `[out, in]`.
void check_grouped(const Grouped& layout, const Tensor& panels, int64_t out_features, int64_t in_features);

// Panels from numbers `[out, in]` uint8, coarse scales `[out, runs]` float16 or float32, fine ones
// `[out, runs * chunks * fine]` int8, and minima, like the scales.
Tensor pack_grouped(Sizes layout, const Tensor& numbers, const Tensor& coarse,
                        const std::optional<Tensor>& fine, const std::optional<Tensor>& coarse_minima,
                        const std::optional<Tensor>& fine_minima);

// Panels from a weight `[out, in]`, float32, bfloat16 or float16. The layout has four bits, no fine scales, and coarse
// ones in float16; its middle is 8 where there are no minima. Of several scales for a group the one with the least
// squared error is taken. The first covers the group's largest weight (or, with minima, both ends); the others clip it,
// and are finer for the rest.
Tensor round_grouped(Sizes layout, const Tensor& weight);

// The rows of a weight `[out, in]` that `rows` `[n]` int64 names, `[n, in]`, float32 or bfloat16.
Tensor grouped_rows(Sizes layout, const Tensor& panels, const Tensor& rows, int64_t out_features,
                        int64_t in_features, ScalarType dtype);

// All rows.
Tensor grouped_values(Sizes layout, const Tensor& panels, int64_t out_features, int64_t in_features,
                          ScalarType dtype);

}  // namespace inflight
