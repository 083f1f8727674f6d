// Activations, float32 or bfloat16, to float and back.
#pragma once

#include "tensor.h"

#include <algorithm>

#include "vectors.h"

namespace inflight {

inline Floats load_floats(const float* from) { return load<Floats>(from); }
inline Floats load_floats(const bfloat16* from) {
  return (Floats)(__builtin_convertvector(load<Halves>(from), Bits) << 16);
}

inline void read_floats(const float* from, int64_t count, float* to) { std::copy_n(from, count, to); }
inline void read_floats(const bfloat16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = float_of(from[i].x);
}

inline void store_floats(Floats values, float* to) { store(to, values); }
inline void store_floats(Floats values, bfloat16* to) {
#ifdef __AVX512BF16__
  store(to, (__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
  store(to, __builtin_convertvector(bfloat16_of(values), Halves));
#endif
}

inline void store_float(float value, float* to) { *to = value; }
inline void store_float(float value, uint16_t* to) { *to = bfloat16_of(value); }
inline void store_float(float value, bfloat16* to) { to->x = bfloat16_of(value); }

}  // namespace inflight
