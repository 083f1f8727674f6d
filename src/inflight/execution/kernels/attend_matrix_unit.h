// The products of rows with a tile's keys and values, as pairs of bfloat16, through a CPU's matrix unit.
//
// A stripe's keys in bfloat16 already lie as the unit needs them, sixteen operands of sixteen tokens at a time. So do its
// values, the eight pairs of its tokens being operands of each dimension; those of two stripes are copied together for one
// product. Numbers of eight and four bits are expanded in the same order; for few rows that takes longer than the products,
// so vectors compute these, with the unit's bits: it sums first and second neighbours of a tile apart, rounds each product
// and sum once, and takes denormal numbers for zero (Intel's Software Developer's Manual, TDPBF16PS).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "aligned.h"
#include "attend_vectors.h"
#include "matrix_unit.h"

namespace inflight {

#ifdef INFLIGHT_MATRIX_UNIT

template <class Kind>
class UnitProducts {
  using Stripes = std::vector<Stripe<Kind>>;
  static constexpr bool kExpands = !std::is_same_v<Kind, BFloat16>;
  struct Keys {
    const typename Kind::Operand *left, *right;
  };

 public:
  using Operand = typename Kind::Operand;
  using Denormals = DenormalsAreZero;

  // If `rereads`, several calls of `score` use the same keys, which are expanded once.
  explicit UnitProducts(bool rereads) : keeps_keys_(rereads) {}

  static constexpr int kStripesOfProduct = 2;
  // The unit stores what lies together three times as fast.
  static constexpr Strides strides(int64_t) { return {2 * kLanes, (kRowsScored + 1) * 2 * kLanes}; }

  static Floats exp2(Floats x) { return exp2_to_one_for_bfloat16(x); }

  // As `VectorProducts::score`.
  void score(const Operand* queries, int64_t query_stride, int num_rows, const Stripes& stripes, int steps,
             Prefetcher<Kind>& prefetcher, int64_t ahead, float* scores) {
    int at_once = std::min(steps, kTileOperands);
    while (steps % at_once) --at_once;
    const int num_stripes = int(stripes.size()), num_parts = steps / at_once;
    if constexpr (kExpands)
      if (num_rows <= kFewRows) return with_few(num_rows, [&](auto rows) {
        score_few<rows>(queries, query_stride, stripes, steps, at_once, prefetcher, ahead, scores);
      });
    for (int s = 0; s < num_stripes; s += 2, scores += strides(num_stripes).of_product) {
      const int other = std::min(s + 1, num_stripes - 1);
      const auto [left, right] = keys_of(stripes, s, other, steps);
      // The hardware does not see where the next keys lie. (Those of few rows come out of memory: this would not help.)
      const bool fetches = num_rows > kTileRows && s + 2 < num_stripes && (!kExpands || s + 2 < num_expanded_);
      const Keys next = fetches ? keys_of(stripes, s + 2, std::min(s + 3, num_stripes - 1), steps) : Keys{left, right};
      for (int row = 0; row < num_rows; row += kGroupRows) {
        unit_.begin(std::min(kGroupRows, num_rows - row), at_once);
        for (int part = 0; part < num_parts; ++part) {
          prefetcher.advance(row ? 0 : ahead * 2 / (num_parts * kStripesAtOnce));
          const int64_t at = int64_t(part) * at_once * kLanes;
          unit_.add(queries + row * query_stride + part * at_once, query_stride, left + at, right + at, kTileRowBytes,
                    [&](int product) __attribute__((always_inline)) {
                      if (!fetches) return;
                      const int lines = (at_once + 1) / 2, first = part * at_once + product % 2 * lines;
                      for (int line = first; line < std::min(first + lines, steps); ++line)
                        __builtin_prefetch((product < 2 ? next.left : next.right) + line * kLanes, 0, 3);
                    });
        }
        unit_.store(scores + row * 2 * kLanes);
      }
    }
  }

  // As `VectorProducts::sum_values`.
  void sum_values(const Operand* weights, int64_t weight_stride, int num_rows, const Stripes& stripes,
                  Prefetcher<Kind>& prefetcher, int64_t ahead, int value_lanes, const Partial* results,
                  const Shares* shares) {
    if constexpr (kExpands)
      if (num_rows <= kFewRows) return with_few(num_rows, [&](auto rows) {
        sum_values_of_few<rows>(weights, weight_stride, stripes, prefetcher, ahead, value_lanes, results, shares);
      });
    const int num_products = int(stripes.size() + 1) / 2, num_parts = (value_lanes + 2 * kLanes - 1) / (2 * kLanes);
    thread_local AlignedVector<Operand> copies;
    copies.resize(num_products * kTileOperands * 2 * kLanes);
    for (int lane = 0; lane < value_lanes; lane += 2 * kLanes) {
      const int num_vectors = lane + kLanes < value_lanes ? 2 : 1;
      copy_values(stripes, value_lanes, lane, num_vectors, copies.data());
      for (int row = 0; row < num_rows; row += kGroupRows) {
        const int count = std::min(kGroupRows, num_rows - row);
        unit_.begin(count, kTileOperands);
        for (int product = 0; product < num_products; ++product) {
          prefetcher.advance(row ? 0 : ahead * 2 / (num_parts * kStripesAtOnce));
          const Operand* values = copies.data() + int64_t(product) * kTileOperands * 2 * kLanes;
          unit_.add(weights + row * weight_stride + product * kTileOperands, weight_stride, values, values + kLanes,
                    2 * kTileRowBytes);
        }
        alignas(64) float sums[kGroupRows][2 * kLanes];
        unit_.store(sums[0]);
        for (int i = row; i < row + count; ++i)
          for (int v = 0; v < num_vectors; ++v)
            shares[i].merge(results[i].values + lane + v * kLanes, load<Floats>(&sums[i - row][v * kLanes]));
      }
    }
  }

 private:
  class Unit {
   public:
    ~Unit() { _tile_release(); }

    // New sums of `num_rows` rows, of products of `num_operands`.
    void begin(int num_rows, int num_operands) {
      if (num_rows != num_rows_ || num_operands != num_operands_) shape_tiles(num_rows, num_operands);
      num_rows_ = num_rows, num_operands_ = num_operands;
      clear_sums(num_rows);
    }

    // Between the products it calls beside(0) to beside(3).
    template <class Beside = Nothing>
    [[gnu::always_inline]] void add(const Operand* rows, int64_t stride, const void* left, const void* right,
                                    int64_t operand_bytes, const Beside& beside = {}) {
      add_tile_products<false>((const char*)rows, num_rows_, stride * sizeof(Operand), (const char*)left,
                               (const char*)right, operand_bytes, beside);
    }

    // `[rows, 32]` floats.
    void store(float* to) {
      constexpr int64_t kBytes = 2 * kTileRowBytes;
      _tile_stored(0, to, kBytes);
      _tile_stored(1, to + kLanes, kBytes);
      if (num_rows_ <= kTileRows) return;
      to += kTileRows * 2 * kLanes;
      _tile_stored(2, to, kBytes);
      _tile_stored(3, to + kLanes, kBytes);
    }

   private:
    int num_rows_ = 0, num_operands_ = 0;
  };

  static constexpr int kFewRows = 4, kFewVectors = 2;  // 16 sums of terms, in 32 registers

  // Calls function<rows>.
  template <class Function>
  static void with_few(int num_rows, const Function& function) {
    if (num_rows == 1) function(std::integral_constant<int, 1>{});
    else if (num_rows == 2) function(std::integral_constant<int, 2>{});
    else if (num_rows == 3) function(std::integral_constant<int, 3>{});
    else function(std::integral_constant<int, 4>{});
  }

  // Sums of first and of second neighbours of rows and vectors.
  template <int kRows, int kVectors>
  struct Terms {
    Floats first[kRows][kVectors] = {}, second[kRows][kVectors] = {};

    // Adds a product of each row; `operands` are its pairs of floats, `stride` floats apart, and `at(v)` a vector's packs.
    template <class At>
    [[gnu::always_inline]] void add(const float* operands, int64_t stride, const At& at) {
      for (int v = 0; v < kVectors; ++v) {
        const Floats left = Kind::template load_term<0>(at(v)), right = Kind::template load_term<1>(at(v));
        for (int r = 0; r < kRows; ++r) {
          first[r][v] = fused(broadcast(operands[r * stride]), left, first[r][v]);
          second[r][v] = fused(broadcast(operands[r * stride + 1]), right, second[r][v]);
        }
      }
    }
  };

  // The pairs of floats of `count` operands of each row. Returns how far rows lie apart.
  static int64_t floats_of_operands(const Operand* operands, int64_t stride, int num_rows, int64_t count,
                                    AlignedVector<float>& to) {
    const int64_t to_stride = 2 * count;
    to.resize(num_rows * to_stride);
    for (int r = 0; r < num_rows; ++r)
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t pair = uint32_t(operands[r * stride + i]);
        to[r * to_stride + 2 * i] = float_of(uint16_t(pair)), to[r * to_stride + 2 * i + 1] = float_of(uint16_t(pair >> 16));
      }
    return to_stride;
  }

  template <int kRows>
  static void score_few(const Operand* queries, int64_t query_stride, const Stripes& stripes, int steps, int at_once,
                        Prefetcher<Kind>& prefetcher, int64_t ahead, float* scores) {
    thread_local AlignedVector<float> floats;
    const int64_t stride = floats_of_operands(queries, query_stride, kRows, steps, floats);
    const int num_stripes = int(stripes.size());
    for (int s = 0; s < num_stripes; s += kFewVectors, scores += strides(num_stripes).of_product) {
      const typename Kind::Stored* keys[kFewVectors];
      for (int v = 0; v < kFewVectors; ++v) keys[v] = stripes[std::min(s + v, num_stripes - 1)].keys;
      Floats sums[kRows][kFewVectors] = {};
      for (int part = 0; part < steps; part += at_once) {
        Terms<kRows, kFewVectors> terms;
        for (int step = part; step < part + at_once; ++step) {
          prefetcher.advance(ahead * kFewVectors / (steps * kStripesAtOnce));
          terms.add(&floats[2 * step], stride, [&](int v) { return keys[v] + int64_t(step) * Kind::kUnits; });
        }
        for (int r = 0; r < kRows; ++r)
          for (int v = 0; v < kFewVectors; ++v) sums[r][v] += terms.first[r][v] + terms.second[r][v];
      }
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kFewVectors; ++v) inflight::store(scores + r * 2 * kLanes + v * kLanes, sums[r][v]);
    }
  }

  template <int kRows>
  static void sum_values_of_few(const Operand* weights, int64_t weight_stride, const Stripes& stripes,
                                Prefetcher<Kind>& prefetcher, int64_t ahead, int value_lanes, const Partial* results,
                                const Shares* shares) {
    constexpr int kPairs = kLanes / Kind::kPack;
    thread_local AlignedVector<float> floats;
    const int num_stripes = int(stripes.size());
    const int64_t stride = floats_of_operands(weights, weight_stride, kRows, num_stripes * kPairs, floats);
    const int64_t row_units = int64_t(value_lanes / kLanes) * Kind::kUnits;
    const auto sum = [&](auto num_vectors, int lane) {
      Floats sums[kRows][num_vectors] = {};
      for (int s = 0; s < num_stripes; s += kStripesOfProduct) {
        Terms<kRows, num_vectors> terms;
        for (int stripe = s; stripe < std::min(s + kStripesOfProduct, num_stripes); ++stripe) {
          const auto* values = stripes[stripe].values + int64_t(lane / kLanes) * Kind::kUnits;
          // Beside the last token lies what no token owns: its weight is zero, and no number of these kinds is infinite.
          for (int pair = 0; pair < (stripes[stripe].length + 1) / Kind::kPack; ++pair, values += row_units) {
            prefetcher.advance(ahead / (kPairs * kStripesAtOnce));
            terms.add(&floats[2 * (stripe * kPairs + pair)], stride,
                      [&](int v) { return values + int64_t(v) * Kind::kUnits; });
          }
        }
        for (int r = 0; r < kRows; ++r)
          for (int v = 0; v < num_vectors; ++v) sums[r][v] += terms.first[r][v] + terms.second[r][v];
      }
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < num_vectors; ++v)
          shares[r].merge(results[r].values + lane + v * kLanes, sums[r][v]);
    };
    int lane = 0;
    for (; lane + kFewVectors * kLanes <= value_lanes; lane += kFewVectors * kLanes)
      sum(std::integral_constant<int, kFewVectors>{}, lane);
    for (; lane < value_lanes; lane += kLanes) sum(std::integral_constant<int, 1>{}, lane);
  }

  // The operands of two stripes.
  Keys keys_of(const Stripes& stripes, int left, int right, int steps) {
    if constexpr (!kExpands) {
      return {(const Operand*)stripes[left].keys, (const Operand*)stripes[right].keys};
    } else {
      thread_local AlignedVector<Operand> memory;
      const int64_t size = int64_t(steps) * kLanes;
      if (num_expanded_ == 0) memory.resize(std::max(memory.size(), size_t(size) * (keeps_keys_ ? stripes.size() + 1 : 2)));
      Operand* to = memory.data() + (keeps_keys_ ? left * size : 0);
      if (left >= num_expanded_) {
        for (int step = 0; step < steps; ++step) {
          inflight::store(to + step * kLanes, Kind::load_panel(stripes[left].keys + int64_t(step) * Kind::kUnits));
          inflight::store(to + size + step * kLanes, Kind::load_panel(stripes[right].keys + int64_t(step) * Kind::kUnits));
        }
        num_expanded_ = keeps_keys_ ? left + 2 : 1;
      }
      return {to, to + size};
    }
  }

  // The values of dimensions [lane, lane + 32) of all stripes: two stripes are the operands of a tile, and what belongs
  // to no token is zero.
  static void copy_values(const Stripes& stripes, int value_lanes, int lane, int num_vectors, Operand* to) {
    constexpr int kPairs = kLanes / Kind::kPack;
    const int64_t row_units = int64_t(value_lanes / kLanes) * Kind::kUnits;
    for (size_t s = 0; s < stripes.size() + stripes.size() % 2; ++s) {
      const int length = s < stripes.size() ? stripes[s].length : 0;
      const auto* from = length ? stripes[s].values + int64_t(lane / kLanes) * Kind::kUnits : nullptr;
      for (int pair = 0; pair < kPairs; ++pair, from += row_units, to += 2 * kLanes) {
        const int left = length - pair * Kind::kPack;
        const Bits mask = Bits{} + (left >= Kind::kPack ? 0xffffffff : 0xffff);
        inflight::store(to, left > 0 ? Kind::load_panel(from) & mask : Bits{});
        inflight::store(to + kLanes, left > 0 && num_vectors > 1 ? Kind::load_panel(from + Kind::kUnits) & mask : Bits{});
      }
    }
  }

  const bool keeps_keys_;
  int num_expanded_ = 0;  // stripes whose keys are expanded and kept
  Unit unit_;
};

template <class Kind>
using Products = std::conditional_t<std::is_same_v<Kind, Float32>, VectorProducts<Kind>, UnitProducts<Kind>>;

#else

template <class Kind>
using Products = VectorProducts<Kind>;

#endif

}  // namespace inflight
