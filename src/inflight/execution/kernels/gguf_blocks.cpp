#include "gguf_blocks.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "checks.h"
#include "linear.h"
#include "parallel.h"
#include "vectors.h"

namespace inflight {
namespace {

constexpr uint16_t kHalfExponent = 0x7c00, kHalfSign = 0x8000;

// An unpacked block. Scales and minima are as stored.
struct Block {
  int64_t scale_bytes;
  uint32_t coarse, minimum;
  int8_t fine[16], fine_minima[16];
  uint8_t numbers[256];
};

uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// Bytes whose lower halves come first, then their higher ones.
void take_halves(const uint8_t* from, int count, uint8_t* to) {
  for (int i = 0; i < count; ++i) {
    to[i] = from[i] & 15;
    to[count + i] = from[i] >> 4;
  }
}

void take_fifth_bits(const uint8_t* from, uint8_t* numbers) {
  const auto bits = load<uint32_t>(from);
  for (int i = 0; i < 32; ++i) numbers[i] |= (bits >> i & 1) << 4;
}

// Bit j of byte i is one of number `32 * j + i`.
void take_plane(const uint8_t* from, int shift, uint8_t* numbers) {
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 32; ++i) numbers[32 * j + i] |= (from[i] >> j & 1) << shift;
}

// Two bits each: of byte i, pair s is one of number `32 * s + i`.
void take_pairs(const uint8_t* from, int shift, uint8_t* numbers) {
  for (int half = 0; half < 2; ++half, from += 32, numbers += 128)
    for (int s = 0; s < 4; ++s)
      for (int i = 0; i < 32; ++i) numbers[32 * s + i] |= (from[i] >> 2 * s & 3) << shift;
}

void take_q4_0(const uint8_t* from, Block& to) {
  to.coarse = half_at(from);
  take_halves(from + 2, 16, to.numbers);
}

void take_q4_1(const uint8_t* from, Block& to) {
  to.coarse = half_at(from);
  to.minimum = half_at(from + 2) ^ kHalfSign;
  take_halves(from + 4, 16, to.numbers);
}

void take_q5_0(const uint8_t* from, Block& to) {
  to.coarse = half_at(from);
  take_halves(from + 6, 16, to.numbers);
  take_fifth_bits(from + 2, to.numbers);
}

void take_q5_1(const uint8_t* from, Block& to) {
  to.coarse = half_at(from);
  to.minimum = half_at(from + 2) ^ kHalfSign;
  take_halves(from + 8, 16, to.numbers);
  take_fifth_bits(from + 4, to.numbers);
}

void take_q8_0(const uint8_t* from, Block& to) {
  to.coarse = half_at(from);
  for (int i = 0; i < 32; ++i) to.numbers[i] = from[2 + i] ^ 128;
}

// Shared by four- and five-bit types: eight scales and eight minima of six bits in twelve bytes.
void take_scales(const uint8_t* from, Block& to) {
  to.coarse = half_at(from);
  to.minimum = half_at(from + 2);
  const uint8_t *first = from + 4, *second = first + 4, *third = second + 4;
  for (int i = 0; i < 4; ++i) {
    to.fine[i] = first[i] & 63;
    to.fine[4 + i] = (third[i] & 15) | first[i] >> 6 << 4;
    to.fine_minima[i] = second[i] & 63;
    to.fine_minima[4 + i] = third[i] >> 4 | second[i] >> 6 << 4;
  }
}

void take_q4_k(const uint8_t* from, Block& to) {
  take_scales(from, to);
  for (int pair = 0; pair < 4; ++pair) take_halves(from + 16 + 32 * pair, 32, to.numbers + 64 * pair);
}

void take_q5_k(const uint8_t* from, Block& to) {
  take_scales(from, to);
  for (int pair = 0; pair < 4; ++pair) take_halves(from + 48 + 32 * pair, 32, to.numbers + 64 * pair);
  take_plane(from + 16, 4, to.numbers);
}

void take_q6_k(const uint8_t* from, Block& to) {
  for (int half = 0; half < 2; ++half) take_halves(from + 64 * half, 64, to.numbers + 128 * half);
  take_pairs(from + 128, 4, to.numbers);
  std::memcpy(to.fine, from + 192, 16);
  to.coarse = half_at(from + 208);
}

void take_q3_k(const uint8_t* from, Block& to) {
  std::memset(to.numbers, 0, sizeof to.numbers);
  take_pairs(from + 32, 0, to.numbers);
  take_plane(from, 2, to.numbers);
  uint8_t low[16];
  take_halves(from + 96, 8, low);
  for (int i = 0; i < 16; ++i) to.fine[i] = int8_t(low[i] | (from[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
  to.coarse = half_at(from + 108);
}

void take_q2_k(const uint8_t* from, Block& to) {
  std::memset(to.numbers, 0, sizeof to.numbers);
  take_pairs(from + 16, 0, to.numbers);
  for (int i = 0; i < 16; ++i) {
    to.fine[i] = from[i] & 15;
    to.fine_minima[i] = from[i] >> 4;
  }
  to.coarse = half_at(from + 80);
  to.minimum = half_at(from + 82);
}

void take_tq2_0(const uint8_t* from, Block& to) {
  std::memset(to.numbers, 0, sizeof to.numbers);
  take_pairs(from, 0, to.numbers);
  to.coarse = half_at(from + 64);
}

// Five numbers, or in the last bytes four, in a byte: a fraction of 256, whose digits to base three they are. Of `count`
// bytes digit i is that of number `count * i + byte`.
void take_digits(const uint8_t* from, int count, int num_digits, uint8_t* numbers) {
  for (int byte = 0; byte < count; ++byte)
    for (uint8_t i = 0, rest = from[byte]; i < num_digits; ++i, rest = uint8_t(rest * 3))
      numbers[count * i + byte] = uint8_t(rest * 3 >> 8);
}

void take_tq1_0(const uint8_t* from, Block& to) {
  take_digits(from, 32, 5, to.numbers);
  take_digits(from + 32, 16, 5, to.numbers + 160);
  take_digits(from + 48, 4, 4, to.numbers + 240);
  to.coarse = half_at(from + 52);
}

void take_iq4_xs(const uint8_t* from, Block& to) {
  to.coarse = half_at(from);
  for (int i = 0; i < 8; ++i) {
    const int low = from[4 + i / 2] >> i % 2 * 4 & 15, high = from[2 + i / 4] >> i % 4 * 2 & 3;
    to.fine[i] = int8_t((low | high << 4) - 32);
    take_halves(from + 8 + 16 * i, 16, to.numbers + 32 * i);
  }
}

void take_mxfp4(const uint8_t* from, Block& to) {
  const int power = from[0] - 128;  // numbers stand for twice their value
  if (from[0] == 255) to.coarse = to.scale_bytes == 4 ? std::bit_cast<uint32_t>(kInfinity) : kHalfExponent;
  else if (to.scale_bytes == 4) to.coarse = std::bit_cast<uint32_t>(std::ldexp(1.f, power));
  else to.coarse = power < -14 ? 1 << (power + 24) : (power + 15) << 10;
  take_halves(from + 1, 16, to.numbers);
}

bool is_finite(uint32_t scale, int64_t bytes) {
  return bytes == 4 ? std::isfinite(std::bit_cast<float>(scale)) : (scale & kHalfExponent) != kHalfExponent;
}

// Takes the blocks of a panel's outputs at one place, and writes them as its run. Returns whether their scales are finite.
template <auto kTake, int kBits>
bool pack_run(const Grouped& layout, const uint8_t* const* rows, int64_t num_rows, int64_t offset, uint8_t* run) {
  Block block;
  block.scale_bytes = layout.scale_bytes;
  bool are_finite = true;
  for (int64_t output = 0; output < num_rows; ++output) {
    block.minimum = 0;
    kTake(rows[output] + offset, block);
    are_finite &= is_finite(block.coarse, layout.scale_bytes) && is_finite(block.minimum, layout.scale_bytes);
    if (layout.scale_bytes == 4) store(run + 4 * output, block.coarse);
    else store(run + 2 * output, uint16_t(block.coarse));
    if (layout.minima) store(run + 2 * (kPanelOutputs + output), uint16_t(block.minimum));
    uint8_t* chunk = run + layout.head_bytes();
    for (int64_t c = 0; c < layout.chunks(); ++c, chunk += layout.chunk_bytes()) {
      for (int64_t part = 0; part < layout.fine; ++part) {
        const int64_t place = part * kPanelOutputs + output, own = c * layout.fine + part;
        chunk[place] = uint8_t(block.fine[own]);
        if (layout.minima) chunk[layout.fine_bytes() + place] = uint8_t(block.fine_minima[own]);
      }
      write_numbers<kBits>(chunk + layout.fine_bytes() + layout.minima_bytes(), output, block.numbers + kChunk * c);
    }
  }
  return are_finite;
}

// Of fresh memory: huge pages mean fewer page faults and TLB misses.
void ask_for_large_pages(const Tensor& memory) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 1 << 21;
  const auto begin = reinterpret_cast<uintptr_t>(memory.data_ptr()), end = begin + memory.nbytes();
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

struct BlockType {
  std::string_view kind;
  int64_t inputs, bytes, bits;
  bool (*pack_run)(const Grouped&, const uint8_t* const*, int64_t, int64_t, uint8_t*);
};

template <auto kTake, int kBits>
constexpr BlockType type_of(std::string_view kind, int64_t inputs, int64_t bytes) {
  return {kind, inputs, bytes, kBits, pack_run<kTake, kBits>};
}

constexpr BlockType kTypes[] = {
    type_of<take_q4_0, 4>("Q4_0", 32, 18),     type_of<take_q4_1, 4>("Q4_1", 32, 20),
    type_of<take_q5_0, 5>("Q5_0", 32, 22),     type_of<take_q5_1, 5>("Q5_1", 32, 24),
    type_of<take_q8_0, 8>("Q8_0", 32, 34),     type_of<take_q3_k, 3>("Q3_K", 256, 110),
    type_of<take_q4_k, 4>("Q4_K", 256, 144),   type_of<take_q5_k, 5>("Q5_K", 256, 176),
    type_of<take_q6_k, 6>("Q6_K", 256, 210),   type_of<take_q4_0, 4>("IQ4_NL", 32, 18),
    type_of<take_iq4_xs, 4>("IQ4_XS", 256, 136), type_of<take_mxfp4, 4>("MXFP4", 32, 17),
    type_of<take_q2_k, 2>("Q2_K", 256, 84),    type_of<take_tq1_0, 2>("TQ1_0", 256, 54),
    type_of<take_tq2_0, 2>("TQ2_0", 256, 66),
};

}  // namespace

Tensor pack_blocks(std::string_view kind, Sizes words, const std::vector<Tensor>& blocks, const Tensor& rows) {
  const Grouped layout(words);
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& each) { return each.kind == kind; });
  CHECK(type != std::end(kTypes), "there is no type '", kind, "' of blocks");
  CHECK(layout.coarse == type->inputs && layout.bits == type->bits && layout.chunks() * layout.fine <= 16 &&
            (!layout.minima || layout.scale_bytes == 2),
        "blocks of ", kind, " do not lie in this way");
  check_whole(rows, "row numbers", 2, kLong);
  check_size(rows, "row numbers", 0, int64_t(blocks.size()));
  CHECK(rows.numel() > 0, "a layer must have inputs and outputs");
  const int64_t num_runs = blocks[0].dim() == 3 ? blocks[0].size(1) : 0, out = rows.size(1);
  CHECK(num_runs > 0, "a layer must have inputs and outputs");
  for (const Tensor& each : blocks) {
    check_whole(each, "blocks", 3, kByte);
    check_size(each, "blocks", 1, num_runs);
    check_size(each, "blocks", 2, type->bytes);
  }
  const auto* numbers = rows.const_data_ptr<int64_t>();
  std::vector<const uint8_t*> row_blocks(out);
  for (size_t t = 0; t < blocks.size(); ++t)
    for (int64_t output = 0; output < out; ++output) {
      const int64_t number = numbers[int64_t(t) * out + output];
      CHECK(number >= 0 && number <= blocks[t].size(0), "there is no row ", number);
      if (number > 0) row_blocks[output] = blocks[t].const_data_ptr<uint8_t>() + (number - 1) * num_runs * type->bytes;
    }
  for (const auto* each : row_blocks) CHECK(each, "some rows are nowhere");
  const int64_t num_panels = (out + kPanelOutputs - 1) / kPanelOutputs;
  Tensor panels = empty({num_panels, num_runs * layout.run_bytes()}, kByte);
  ask_for_large_pages(panels);
  std::atomic<bool> are_finite{true};
  for_each_range(num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanelOutputs, num_rows = std::min<int64_t>(kPanelOutputs, out - first);
      uint8_t* own = panels.data_ptr<uint8_t>() + panel * panels.size(1);
      if (num_rows < kPanelOutputs) std::fill_n(own, panels.size(1), 0);
      for (int64_t r = 0; r < num_runs; ++r)
        if (!type->pack_run(layout, &row_blocks[first], num_rows, r * type->bytes, own + r * layout.run_bytes()))
          are_finite.store(false, std::memory_order_relaxed);
    }
  });
  CHECK(are_finite, "some scales are not finite");
  return panels;
}

}  // namespace inflight
