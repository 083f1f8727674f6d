// As many floats at once as a register holds, in the compiler's portable vector types: the same source
// becomes AVX-512, AVX2 and NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace inflight {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Bits = uint32_t __attribute__((vector_size(4 * kLanes)));
using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Bytes = int8_t __attribute__((vector_size(kLanes)));

inline Ints lane_numbers() {
  Ints numbers{};
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// Numbers of eight bits, from and to memory. (With AVX2 GCC converts them one by one.)
inline Floats floats_of_bytes(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(load<Bytes>(from), Floats);
#endif
}

inline Ints ints_of_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load<Bytes>(from), Ints) & 255;
#endif
}

inline void store_bytes(Ints values, int8_t* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i words = _mm256_packs_epi32((__m256i)values, (__m256i)values);
  const __m256i bytes = _mm256_packs_epi16(words, words);
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  _mm_storel_epi64((__m128i*)to, _mm_unpacklo_epi32(low, high));
#else
  store(to, __builtin_convertvector(values, Bytes));
#endif
}

inline Floats broadcast(float value) { return value - Floats{}; }

// Keeps GCC from rereading it from memory for every product.
template <class Vector>
inline void keep_in_register(Vector& vector) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<Vector, Floats>) asm("" : "+x"(vector));
#endif
}

// `a * b + c`, rounded once where the CPU can.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Products of two numbers of 16 bits in each lane, added; `b` is the same for all lanes.
#if defined(__AVX512BW__)
inline Ints products_of_pairs(Shorts a, int32_t b) {
  return (Ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(b));
}
#elif defined(__AVX2__)
inline Ints products_of_pairs(Shorts a, int32_t b) {
  return (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(b));
}
#endif

// The greater or less of each pair; a NaN in `a` stays.
#ifdef __AVX512F__
inline Floats max(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)b, (__m512)a); }
inline Floats min(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)b, (__m512)a); }
#else
inline Floats max(Floats a, Floats b) { return a < b ? b : a; }
inline Floats min(Floats a, Floats b) { return a > b ? b : a; }
#endif

// Whether any lane is not zero.
inline bool any(Ints v) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
  int32_t lanes[kLanes], all = 0;
  store(lanes, v);
  for (const int32_t lane : lanes) all |= lane;
  return all != 0;
#endif
}

// Sums and maxima over lanes fold halves: always in the same order.
inline float sum_of_lanes(Floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

inline float max_of_lanes(Floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] < lanes[i + half] ? lanes[i + half] : lanes[i];
  return lanes[0];
#endif
}

// `x` rounded to an integer, for |x| below 2^22.
inline Floats rounded(Floats x) {
#ifdef __AVX512F__
  return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  constexpr float kRounder = 12582912.f;  // 1.5 * 2^23
  return (x + kRounder) - kRounder;
#endif
}

// e^x to about two units in the last place; 0 below -87.3, where the result would be denormal. After Cephes' expf.
inline Floats exp(Floats x) {
  constexpr float kLowest = -87.3f, kHighest = 88.3f;
  const Floats clamped = min(max(x, broadcast(kLowest)), broadcast(kHighest));
  const Floats n = rounded(clamped * 1.44269504f);
  const Floats r = fused(n, broadcast(2.12194440e-4f), fused(n, broadcast(-0.693359375f), clamped));
  Floats p = broadcast(1.9875691500e-4f);
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.f, 1.f})
    p = fused(p, r, broadcast(next));
#ifdef __AVX512F__
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)n);
#else
  const Floats result = (Floats)((Ints)p + (__builtin_convertvector(n, Ints) << 23));
  return x < kLowest ? Floats{} : result;
#endif
}

// log(1 + x) for x from 0 to 1, to about two units in the last place. After Cephes' logf, and Kahan for small x.
inline Floats log1p_to_one(Floats x) {
  const Floats sum = x + 1.f, half = sum > 1.41421356f ? sum * 0.5f : sum;
  const Floats f = half - 1.f, square = f * f, e = sum > 1.41421356f ? broadcast(1.f) : Floats{};
  Floats p = broadcast(7.0376836292e-2f);
  for (const float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                           2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fused(p, f, broadcast(next));
  p = fused(p, f * square, fused(e, broadcast(-2.12194440e-4f), square * -0.5f));
  const Floats log = fused(e, broadcast(0.693359375f), f + p), low = sum - 1.f;
  return low == 0.f ? x : log * (x / low);
}

// 2^x for x of about 0 and less, by a polynomial that is off by 7.5e-8 of it at most; 0 instead of denormal numbers.
inline Floats exp2_to_one(Floats x) {
  constexpr float kLowest = -126;
#ifdef __AVX512F__
  const Floats n = rounded(x);
#else
  const Floats clamped = max(x, broadcast(kLowest)), n = rounded(clamped);
#endif
  const Floats fraction = x - n;
  Floats p = broadcast(1.327647129e-3f);
  for (const float next : {9.675541893e-3f, 5.550713092e-2f, 2.402212024e-1f, 6.931469440e-1f, 1.0000001192f})
    p = fused(p, fraction, broadcast(next));
#ifdef __AVX512F__
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);  // or NaN
  return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)n);
#else
  const Floats result = (Floats)((Ints)p + (__builtin_convertvector(n, Ints) << 23));
  return x < kLowest ? Floats{} : result;
#endif
}

#ifdef __AVX512F__
// The same to 7.5e-5 of it, for what is rounded to bfloat16, where denormal numbers are zero (`DenormalsAreZero`).
inline Floats exp2_to_one_for_bfloat16(Floats x) {
  const Floats fraction = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Floats p = broadcast(7.802446186e-2f);
  for (const float next : {2.260672450e-1f, 6.958335042e-1f, 9.999251962e-1f}) p = fused(p, fraction, broadcast(next));
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// As long as it lives, this thread takes denormal numbers for zero.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | 0x8040); }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  ~DenormalsAreZero() { _mm_setcsr(mode_); }

 private:
  const unsigned mode_;
};
#endif

// The error function, by a polynomial near 0 and by one in the exponent elsewhere (Norbert Juffa's), to a unit or two in
// the last place.
inline Floats erf(Floats x) {
  const auto with = [](Floats sum, Floats x, float next) { return fused(sum, x, broadcast(next)); };
  const Floats size = x < 0.f ? -x : x, square = x * x;
  Floats near = with(broadcast(-5.96761703e-4f), square, 4.99119423e-3f);
  for (const float next : {-2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f}) near = with(near, square, next);
  const Floats high = with(broadcast(-1.72853470e-5f), size, 3.83197126e-4f);
  Floats far = fused(high, square, with(broadcast(-3.88396438e-3f), size, 2.42546219e-2f));
  for (const float next : {-1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f}) far = with(far, size, next);
  far = 1.f - exp(fused(far, size, -size));
  return size > 0.927734375f ? (x < 0.f ? -far : far) : fused(near, x, x);
}

inline Floats tanh(Floats x) { return 1.f - 2.f / (exp(x * 2.f) + 1.f); }

inline float float_of(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest, ties to even, NaN stays NaN.
inline uint16_t bfloat16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Bits bfloat16_of(Floats values) {
  const Bits bits = (Bits)values;
  return (Ints)(bits & 0x7fffffff) > 0x7f800000 ? Bits{} + 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace inflight
