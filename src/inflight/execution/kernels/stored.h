// Storage and products of keys and values: one struct for each dtype of the cache. The layout keeps sums within lanes.
// `kPack` neighbours along the direction of summation are adjacent: 2 for bfloat16, whose hardware product adds pairs,
// else 1. An `Operand` is the pack of the other factor, which is the same for all lanes; `pack` rounds to the nearest,
// ties to even. Without AVX-512 a pack is also taken apart: `load_term` and `term` are one neighbour of it.
#pragma once

#include "vectors.h"

namespace inflight {

struct Float32 {
  using Stored = float;
  using Operand = float;
  using Panel = Floats;
  static constexpr int kPack = 1;
  static Panel load_panel(const Stored* from) { return load<Floats>(from); }
  static Panel load_first_of_pack(const Stored* from) { return load_panel(from); }
  template <int>
  static Floats load_term(const Stored* from) { return load_panel(from); }
  template <int>
  static float term(Operand a) { return a; }
  static Floats multiply_add(Floats sum, Operand a, Panel b) { return fused(broadcast(a), b, sum); }
  static void pack(Floats lanes, Operand* to) { store(to, lanes); }
};

struct Int8 {
  using Stored = int8_t;
  using Operand = float;
  using Panel = Floats;
  static constexpr int kPack = 1;
  static Panel load_panel(const Stored* from) { return floats_of_bytes(from); }
  static Panel load_first_of_pack(const Stored* from) { return load_panel(from); }
  template <int>
  static Floats load_term(const Stored* from) { return load_panel(from); }
  template <int>
  static float term(Operand a) { return a; }
  static Floats multiply_add(Floats sum, Operand a, Panel b) { return fused(broadcast(a), b, sum); }
  static void pack(Floats lanes, Operand* to) { store(to, lanes); }
};

#ifdef __AVX512BF16__

struct BFloat16 {
  using Stored = uint16_t;
  using Operand = int32_t;
  using Panel = __m512bh;
  static constexpr int kPack = 2;
  static Panel load_panel(const Stored* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Panel load_first_of_pack(const Stored* from) {
    return (__m512bh)_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(0xffff));
  }
  static Floats multiply_add(Floats sum, Operand a, Panel b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), b);
  }
  static void pack(Floats lanes, Operand* to) { store(to, (__m256i)_mm512_cvtneps_pbh((__m512)lanes)); }
};

#else

struct BFloat16 {
  using Stored = uint16_t;
  struct Operand {
    float first, second;
  };
  struct Panel {
    Floats first, second;
  };
  static constexpr int kPack = 2;
  static Panel load_panel(const Stored* from) {
    const Bits bits = load<Bits>(from);
    return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000)};
  }
  static Panel load_first_of_pack(const Stored* from) { return {(Floats)(load<Bits>(from) << 16), Floats{}}; }
  template <int kTerm>
  static Floats load_term(const Stored* from) {
    return kTerm == 0 ? (Floats)(load<Bits>(from) << 16) : (Floats)(load<Bits>(from) & 0xffff0000);
  }
  template <int kTerm>
  static float term(Operand a) { return kTerm == 0 ? a.first : a.second; }
  static Floats multiply_add(Floats sum, Operand a, Panel b) {
    return fused(broadcast(a.second), b.second, fused(broadcast(a.first), b.first, sum));
  }
  static void pack(Floats lanes, Operand* to) { store(to, (Floats)(bfloat16_of(lanes) << 16)); }
};

#endif

}  // namespace inflight
