// The products of rows with a tile's keys and values in bfloat16, through a CPU's matrix unit.
//
// A stripe's keys already lie as the unit needs them, sixteen operands of sixteen tokens at a time. So do its values, the
// eight pairs of its tokens being operands of each dimension; those of two stripes are copied together for one product.
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

struct UnitProducts {
  using Operand = BFloat16::Operand;
  using Stripes = std::vector<Stripe<BFloat16>>;

  static constexpr int kStripesOfProduct = 2;
  // The unit stores what lies together three times as fast.
  static constexpr Strides strides(int64_t) { return {2 * kLanes, (kRowsScored + 1) * 2 * kLanes}; }

  // As `VectorProducts::score`.
  void score(const Operand* queries, int64_t query_stride, int num_rows, const Stripes& stripes, int steps,
                    Prefetcher<BFloat16>& prefetcher, int64_t ahead, float* scores) {
    int at_once = std::min(steps, kTileOperands);
    while (steps % at_once) --at_once;
    const int num_stripes = int(stripes.size()), num_parts = steps / at_once;
    for (int s = 0; s < num_stripes; s += 2, scores += strides(num_stripes).of_product) {
      const auto *left = stripes[s].keys, *right = stripes[std::min(s + 1, num_stripes - 1)].keys;
      // The hardware does not see where the next keys lie. (Those of few rows come out of memory: this would not help.)
      for (int next = s + 2; num_rows > kTileRows && next < std::min(num_stripes, s + 4); ++next)
        for (int step = 0; step < steps; ++step)
          __builtin_prefetch(stripes[next].keys + step * kLanes * BFloat16::kPack, 0, 3);
      for (int row = 0; row < num_rows; row += kGroupRows) {
        unit_.begin(std::min(kGroupRows, num_rows - row), at_once);
        for (int part = 0; part < num_parts; ++part) {
          prefetcher.advance(row ? 0 : ahead * 2 / (num_parts * kStripesAtOnce));
          const int64_t at = int64_t(part) * at_once * kLanes * BFloat16::kPack;
          unit_.add(queries + row * query_stride + part * at_once, query_stride, left + at, right + at, kTileRowBytes);
        }
        unit_.store(scores + row * 2 * kLanes);
      }
    }
  }

  // As `VectorProducts::sum_values`.
  void sum_values(const Operand* weights, int64_t weight_stride, int num_rows, const Stripes& stripes,
                         Prefetcher<BFloat16>& prefetcher, int64_t ahead, int value_lanes, const Partial* results,
                         const Shares* shares) {
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

    void add(const Operand* rows, int64_t stride, const void* left, const void* right, int64_t operand_bytes) {
      add_tile_products<false>((const char*)rows, num_rows_, stride * sizeof(Operand), (const char*)left,
                               (const char*)right, operand_bytes);
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

  Unit unit_;

  // The values of dimensions [lane, lane + 32) of all stripes: two stripes are the operands of a tile, and what belongs
  // to no token is zero.
  static void copy_values(const Stripes& stripes, int value_lanes, int lane, int num_vectors, Operand* to) {
    constexpr int kPairs = kLanes / BFloat16::kPack;
    using Pairs = Bits;
    for (size_t s = 0; s < stripes.size() + stripes.size() % 2; ++s) {
      const int length = s < stripes.size() ? stripes[s].length : 0;
      const auto* from = length ? (const Operand*)stripes[s].values + lane : nullptr;
      for (int pair = 0; pair < kPairs; ++pair, from += value_lanes, to += 2 * kLanes) {
        const int left = length - pair * BFloat16::kPack;
        const Pairs mask = Pairs{} + (left >= BFloat16::kPack ? 0xffffffff : 0xffff);
        inflight::store(to, left > 0 ? load<Pairs>(from) & mask : Pairs{});
        inflight::store(to + kLanes, left > 0 && num_vectors > 1 ? load<Pairs>(from + kLanes) & mask : Pairs{});
      }
    }
  }
};

template <class Kind>
using Products = std::conditional_t<std::is_same_v<Kind, BFloat16>, UnitProducts, VectorProducts<Kind>>;

#else

template <class Kind>
using Products = VectorProducts<Kind>;

#endif

}  // namespace inflight
