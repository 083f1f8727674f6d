// Storage and products of keys and values: one struct for each dtype of the cache. The layout keeps sums within lanes.
// `kPack` neighbours along the direction of summation lie together: 2 where the hardware's product of bfloat16 adds pairs,
// else 1. The packs of kLanes lanes are `kUnits` of `Stored`: side by side in bfloat16, the first neighbours of all before
// the second ones in eight bits, halves of a byte in four; `place` is that of a number. An `Operand` is the pack of the
// other factor, which is the same for all lanes; `pack` rounds to the nearest, ties to even, if it is of bfloat16. Without
// such products a pack is also taken apart: `load_term` and `term` are one neighbour of it.
//
// Numbers of eight and four bits have a scale for each token and head. A matrix unit multiplies them as bfloat16, which
// they are without rounding, vectors as floats.
#pragma once

#include "matrix_unit.h"
#include "vectors.h"

namespace inflight {

struct Float32 {
  using Stored = float;
  using Operand = float;
  using Panel = Floats;
  static constexpr int kPack = 1, kUnits = kLanes;
  static constexpr bool kIsScaled = false;
  static int64_t place(int64_t number, int) { return number; }
  static Panel load_panel(const Stored* from) { return load<Floats>(from); }
  static Panel first_of_pack(Panel panel) { return panel; }
  template <int>
  static Floats load_term(const Stored* from) { return load_panel(from); }
  template <int>
  static float term(Operand a) { return a; }
  static Floats multiply_add(Floats sum, Operand a, Panel b) { return fused(broadcast(a), b, sum); }
  static void pack(Floats lanes, Operand* to) { store(to, lanes); }
};

// Pairs of floats, multiplied one after the other.
struct FloatPairs {
  struct Operand {
    float first, second;
  };
  struct Panel {
    Floats first, second;
  };
  static constexpr int kPack = 2;
  static Panel first_of_pack(Panel panel) { return {panel.first, Floats{}}; }
  template <int kTerm>
  static float term(Operand a) { return kTerm == 0 ? a.first : a.second; }
  static Floats multiply_add(Floats sum, Operand a, Panel b) {
    return fused(broadcast(a.second), b.second, fused(broadcast(a.first), b.first, sum));
  }
  static void pack(Floats lanes, Operand* to) { store(to, lanes); }
};

#ifdef __AVX512BF16__

struct BFloat16 {
  using Stored = uint16_t;
  using Operand = int32_t;
  using Panel = Bits;
  static constexpr int kPack = 2, kUnits = 2 * kLanes;
  static constexpr bool kIsScaled = false;
  static int64_t place(int64_t pack, int neighbour) { return 2 * pack + neighbour; }
  static Panel load_panel(const Stored* from) { return load<Bits>(from); }
  static Panel first_of_pack(Panel panel) { return panel & 0xffff; }
  static Floats multiply_add(Floats sum, Operand a, Panel b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
  }
  static void pack(Floats lanes, Operand* to) { store(to, (__m256i)_mm512_cvtneps_pbh((__m512)lanes)); }
};

#else

struct BFloat16 : FloatPairs {
  using Stored = uint16_t;
  static constexpr int kUnits = 2 * kLanes;
  static constexpr bool kIsScaled = false;
  static int64_t place(int64_t pack, int neighbour) { return 2 * pack + neighbour; }
  static Panel load_panel(const Stored* from) { return {load_term<0>(from), load_term<1>(from)}; }
  template <int kTerm>
  static Floats load_term(const Stored* from) {
    return kTerm == 0 ? (Floats)(load<Bits>(from) << 16) : (Floats)(load<Bits>(from) & 0xffff0000);
  }
  static void pack(Floats lanes, Operand* to) { store(to, (Floats)(bfloat16_of(lanes) << 16)); }
};

#endif

#ifdef INFLIGHT_MATRIX_UNIT
using ScaledPairs = BFloat16;
#else
using ScaledPairs = FloatPairs;
#endif

struct Int8 : ScaledPairs {
  using Stored = int8_t;
  static constexpr int kUnits = 2 * kLanes;
  static constexpr bool kIsScaled = true;
  static int64_t place(int64_t pack, int neighbour) {
    return pack / kLanes * kUnits + neighbour * kLanes + pack % kLanes;
  }
  template <int kTerm>
  static Floats load_term(const Stored* from) { return floats_of_bytes(from + kTerm * kLanes); }
  static Panel load_panel(const Stored* from) {
    const Floats first = load_term<0>(from), second = load_term<1>(from);
#ifdef INFLIGHT_MATRIX_UNIT
    return (Bits)first >> 16 | ((Bits)second & 0xffff0000);
#else
    return {first, second};
#endif
  }
};

// n in the low half of a byte, and in its high one for a pack's second number, stands for n - 7.5.
struct Int4 : ScaledPairs {
  using Stored = uint8_t;
  static constexpr int kUnits = kLanes;
  static constexpr bool kIsScaled = true;
  static int64_t place(int64_t pack, int neighbour) { return 2 * pack + neighbour; }
  template <int kTerm>
  static Floats load_term(const Stored* from) { return term_of<kTerm>(ints_of_bytes(from)); }
  template <int kTerm>
  static Floats term_of(Ints bytes) {
#ifdef __AVX512F__
    const Floats numbers{-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f};
    return (Floats)_mm512_permutexvar_ps((__m512i)(kTerm == 0 ? bytes : bytes >> 4), (__m512)numbers);
#else
    return __builtin_convertvector(kTerm == 0 ? bytes & 15 : bytes >> 4, Floats) - 7.5f;
#endif
  }
  static Panel load_panel(const Stored* from) {
    const Ints bytes = ints_of_bytes(from);
#ifdef INFLIGHT_MATRIX_UNIT
    alignas(64) static constexpr uint16_t kNumbers[2 * kLanes] = {
        0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00,
        0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0};
    const Ints halves = (bytes | bytes << 12) & 0x000f000f;
    return (Bits)_mm512_permutexvar_epi16((__m512i)halves, _mm512_load_si512(kNumbers));
#else
    return {term_of<0>(bytes), term_of<1>(bytes)};
#endif
  }
};

}  // namespace inflight
