// The products of rows with a tile's keys and values in bfloat16, through a CPU's matrix unit.
//
// A stripe's keys already lie as the unit needs them, sixteen operands of sixteen tokens at a time, and so do its values:
// the eight pairs of its tokens are the operands of each dimension.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "attend_vectors.h"
#include "matrix_unit.h"

namespace inflight {

#ifdef INFLIGHT_MATRIX_UNIT

// Where the values of stripes lie: of a stripe that is partly used in a copy, with zeros for what belongs to nobody.
class WholeValues {
 public:
  static constexpr int kPairs = kLanes / BFloat16::kPack;

  void collect(const std::vector<Stripe<BFloat16>>& stripes, int value_lanes) {
    const auto is_whole = [](const auto& stripe) { return stripe.length == kLanes; };
    const int64_t num_copies = int64_t(stripes.size()) - std::count_if(stripes.begin(), stripes.end(), is_whole);
    copies_.resize(num_copies * kPairs * value_lanes);
    int32_t* copy = copies_.data();
    at_.clear();
    for (const auto& stripe : stripes) {
      at_.push_back((const char*)(is_whole(stripe) ? stripe.values : (uint16_t*)copy));
      if (is_whole(stripe)) continue;
      const auto* from = (const int32_t*)stripe.values;
      for (int pair = 0; pair < kPairs; ++pair, from += value_lanes, copy += value_lanes) {
        const int left = stripe.length - pair * BFloat16::kPack;
        const int32_t mask = left >= BFloat16::kPack ? -1 : left > 0 ? 0xffff : 0;
        for (int lane = 0; lane < value_lanes; ++lane) copy[lane] = from[lane] & mask;
      }
    }
  }

  const char* operator[](size_t stripe) const { return at_[stripe]; }

 private:
  std::vector<const char*> at_;
  std::vector<int32_t> copies_;
};

struct UnitProducts {
  using Operand = BFloat16::Operand;
  using Stripes = std::vector<Stripe<BFloat16>>;

  // As `VectorProducts::score`.
  static void score(const Operand* queries, int64_t query_stride, int num_rows, const Stripes& stripes, int steps,
                    Prefetcher<BFloat16>& prefetcher, int64_t ahead, float* scores, int64_t score_stride) {
    int at_once = std::min(steps, kTileOperands);
    while (steps % at_once) --at_once;
    shape_tiles(num_rows, at_once);
    const int num_stripes = int(stripes.size()), num_parts = steps / at_once;
    for (int s = 0; s < num_stripes; s += 2) {
      const bool is_pair = s + 1 < num_stripes;
      const auto *left = stripes[s].keys, *right = stripes[s + is_pair].keys;
      clear_sums(num_rows);
      for (int part = 0; part < num_parts; ++part) {
        prefetcher.advance(ahead * 2 / (num_parts * kStripesAtOnce));
        const int64_t at = int64_t(part) * at_once * kLanes * BFloat16::kPack;
        add_tile_products<false>((const char*)(queries + part * at_once), num_rows, query_stride * sizeof(Operand),
                                 (const char*)(left + at), (const char*)(right + at), kTileRowBytes);
      }
      store_sums(num_rows, scores + s * kLanes, score_stride * sizeof(float), is_pair);
    }
    _tile_release();
  }

  // As `VectorProducts::sum_values`.
  static void sum_values(const Operand* weights, int64_t weight_stride, int num_rows, const Stripes& stripes,
                         Prefetcher<BFloat16>& prefetcher, int64_t ahead, int value_lanes, const Partial* results) {
    const int64_t pair_bytes = int64_t(value_lanes) * sizeof(Operand);
    const int num_parts = (value_lanes + 2 * kLanes - 1) / (2 * kLanes);
    thread_local WholeValues values;
    values.collect(stripes, value_lanes);
    shape_tiles(num_rows, WholeValues::kPairs);
    for (int lane = 0; lane < value_lanes; lane += 2 * kLanes) {
      const bool is_pair = lane + kLanes < value_lanes;
      clear_sums(num_rows);
      for (size_t s = 0; s < stripes.size(); ++s) {
        prefetcher.advance(ahead / (num_parts * kStripesAtOnce));
        const char* left = values[s] + lane * sizeof(Operand);
        add_tile_products<false>((const char*)(weights + s * WholeValues::kPairs), num_rows, weight_stride * sizeof(Operand), left,
                                 left + is_pair * kTileRowBytes, pair_bytes);
      }
      alignas(64) float sums[kGroupRows][2 * kLanes];
      store_sums(num_rows, sums[0], sizeof sums[0], is_pair);
      for (int row = 0; row < num_rows; ++row)
        std::memcpy(results[row].values + lane, sums[row], (1 + is_pair) * kLanes * sizeof(float));
    }
    _tile_release();
  }

 private:
  static void clear_sums(int num_rows) {
    _tile_zero(0);
    _tile_zero(1);
    if (num_rows <= kTileRows) return;
    _tile_zero(2);
    _tile_zero(3);
  }

  static void store_sums(int num_rows, float* to, int64_t stride, bool is_pair) {
    _tile_stored(0, to, stride);
    if (is_pair) _tile_stored(1, to + kLanes, stride);
    if (num_rows <= kTileRows) return;
    char* second = (char*)to + kTileRows * stride;
    _tile_stored(2, second, stride);
    if (is_pair) _tile_stored(3, second + kTileRowBytes, stride);
  }
};

template <class Kind>
using Products = std::conditional_t<std::is_same_v<Kind, BFloat16>, UnitProducts, VectorProducts<Kind>>;

#else

template <class Kind>
using Products = VectorProducts<Kind>;

#endif

}  // namespace inflight
