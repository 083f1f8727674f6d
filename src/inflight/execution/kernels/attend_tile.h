// Rows of queries attend to a tile of a paged cache: the arithmetic, on one thread. A tile is the tokens of a sequence
// between two fixed multiples of about 256 positions. Its results are independent: scores, their maximum, the sum of
// their exponentials and the weighted sum of values, in float32. A row's result depends neither on other rows nor on
// where its keys lie in memory; results of tiles are merged in order of position (`merge`). So a token's attention has
// the same bits alone, in a batch, in a chunk and after a cache hit.
#pragma once

#include <array>
#include <cmath>

#include "aligned.h"
#include "attend_matrix_unit.h"
#include "attend_vectors.h"

namespace inflight {

constexpr int kRowsWeighed = 4;

// The scores of kRows rows to their weights: scale, softcap, mask, exponential. Returns their maxima and sums, 0 for a
// row that sees nothing. (Rows together, because each waits for its maximum and sum.)
template <class Kind, int kRows>
std::array<Partial, kRows> weigh(const Shape& shape, const std::vector<Stripe<Kind>>& stripes, const Visible* visible,
                                 float* scores, typename Kind::Operand* weights, int64_t weight_stride) {
  constexpr bool kIsScaled = Kind::kIsScaled;
  constexpr int kStripes = Products<Kind>::kStripesOfProduct;
  constexpr float kLog2OfE = 1.44269504f;
  const int num_stripes = int(stripes.size());
  const Strides strides = Products<Kind>::strides(num_stripes);
  // Products that are only scaled are scaled in the exponent.
  const bool is_plain = !kIsScaled && shape.softcap == 0 && shape.scale > 0;
  const float scale = is_plain ? shape.scale : 1;
  // Calls function(stripe, scores of the first row) for all stripes.
  const auto for_each_stripe = [&](const auto& function) {
    float* of_product = scores;
    for (int first = 0; first < num_stripes; first += kStripes, of_product += strides.of_product)
      for (int s = 0; s < std::min(kStripes, num_stripes - first); ++s)
        function(stripes[first + s], of_product + s * kLanes);
  };
  int low = visible[0].low, high = visible[0].high;  // what all rows see
  for (int r = 1; r < kRows; ++r) low = std::max(low, visible[r].low), high = std::min(high, visible[r].high);
  Floats maxima[kRows];
  for (int r = 0; r < kRows; ++r) maxima[r] = broadcast(-kInfinity);
  for_each_stripe([&](const Stripe<Kind>& stripe, float* at) {
    const int last = stripe.position + stripe.length;
    const bool is_seen = low <= stripe.position && stripe.position + kLanes <= std::min(last, high);
    if (is_plain && is_seen) {
      for (int r = 0; r < kRows; ++r, at += strides.of_row) maxima[r] = max(maxima[r], load<Floats>(at));
      return;
    }
    for (int r = 0; r < kRows; ++r, at += strides.of_row) {
      Floats score = load<Floats>(at);
      if (!is_plain) score *= shape.scale;
      if constexpr (kIsScaled) score *= load<Floats>(stripe.key_scales);
      if (shape.softcap != 0) score = tanh(score / shape.softcap) * shape.softcap;
      if (!is_seen) {
        const Ints position = lane_numbers() + stripe.position;
        score = (position >= visible[r].low) & (position < std::min(last, visible[r].high)) ? score : broadcast(-kInfinity);
      }
      store(at, score);
      maxima[r] = max(maxima[r], score);
    }
  });
  float maximum[kRows];
  Floats negative_maximum[kRows], sums[kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    maximum[r] = visible[r].low < visible[r].high ? max_of_lanes(maxima[r]) : 0;
    negative_maximum[r] = broadcast(-maximum[r] * (scale * kLog2OfE));
  }
  for_each_stripe([&](const Stripe<Kind>& stripe, const float* at) {
    for (int r = 0; r < kRows; ++r, at += strides.of_row) {
      Floats weight = Products<Kind>::exp2(fused(load<Floats>(at), broadcast(scale * kLog2OfE), negative_maximum[r]));
      sums[r] += weight;
      if constexpr (kIsScaled) {
        const Floats scaled = weight * load<Floats>(stripe.value_scales);
        weight = weight == 0.f ? Floats{} : scaled;  // masked keys may have any scale
      }
      Kind::pack(weight, weights + r * weight_stride);
    }
    weights += kLanes / Kind::kPack;
  });
  std::array<Partial, kRows> results;
  for (int r = 0; r < kRows; ++r) {
    if (num_stripes % kStripes)
      std::fill_n(weights + r * weight_stride, kLanes / Kind::kPack, typename Kind::Operand{});
    results[r] = {maximum[r] * scale, sum_of_lanes(sums[r]), nullptr};
  }
  return results;
}

// Merges the weights of later tokens with those of all tokens before them; without any weight they change nothing.
inline Shares merge(Partial& so_far, float max, float sum) {
  if (sum == 0) return {1, 0};
  if (so_far.sum == 0) {
    so_far.max = max, so_far.sum = sum;
    return {0, 1};
  }
  const Shares shares =
      so_far.max < max ? Shares{std::exp(so_far.max - max), 1} : Shares{1, std::exp(max - so_far.max)};
  so_far.max = std::max(so_far.max, max);
  so_far.sum = so_far.sum * shares.old + sum * shares.fresh;
  return shares;
}

// The same for what a later tile contributes as a whole.
inline void merge(Partial& so_far, const Partial& next, int value_lanes) {
  const Shares shares = merge(so_far, next.max, next.sum);
  for (int lane = 0; lane < value_lanes; lane += kLanes)
    shares.merge(so_far.values + lane, load<Floats>(next.values + lane));
}

// One thread's memory for the current tile.
template <class Kind>
struct TileScratch {
  std::vector<Stripe<Kind>> stripes, next;  // of this tile, and of the one that this thread is likely to see next
  AlignedVector<float> scores;
  AlignedVector<typename Kind::Operand> weights;
  std::vector<Shares> shares;
};

// Attend with rows of queries `[num_rows, query_stride]` to the stripes in `scratch`, merging with their results of
// earlier tiles; values are `[value_lanes]` floats each.
template <class Kind>
void attend_tile(const Shape& shape, const typename Kind::Operand* queries, int64_t query_stride, int num_rows,
                 const Visible* visible, TileScratch<Kind>& scratch, Partial* results) {
  const auto& stripes = scratch.stripes;
  const int num_stripes = int(stripes.size()), steps = shape.key_steps(Kind::kPack);
  constexpr int kStripes = Products<Kind>::kStripesOfProduct;
  const int64_t num_products = (num_stripes + kStripes - 1) / kStripes;
  const Strides strides = Products<Kind>::strides(num_stripes);
  // Rows a power of two apart would evict each other from the cache.
  const int64_t weight_stride = num_products * kStripes * kLanes / Kind::kPack + kLanes;
  // Half of the next tile is prefetched while scores are computed, half while values are summed.
  const int64_t stripe_bytes = StripeLayout<Kind>(shape).end, half = stripe_bytes / 2 + kLineBytes;
  Prefetcher<Kind> prefetcher(scratch.next, stripe_bytes);
  Products<Kind> products(num_rows > kRowsScored);
  scratch.scores.resize(kRowsScored * strides.of_row + num_products * strides.of_product);
  scratch.weights.resize(weight_stride * num_rows);
  scratch.shares.resize(num_rows);
  for (int first = 0; first < num_rows; first += kRowsScored) {
    const int end = std::min(first + kRowsScored, num_rows);
    products.score(queries + first * query_stride, query_stride, end - first, stripes, steps, prefetcher,
                   first ? 0 : half, scratch.scores.data());
    const auto weigh_rows = [&](auto num_together, int row) {
      const auto fresh = weigh<Kind, num_together>(
          shape, stripes, visible + row, scratch.scores.data() + (row - first) * strides.of_row,
          scratch.weights.data() + row * weight_stride, weight_stride);
      for (int r = 0; r < num_together; ++r)
        scratch.shares[row + r] = merge(results[row + r], fresh[r].max, fresh[r].sum);
    };
    int row = first;
    for (; row + kRowsWeighed <= end; row += kRowsWeighed) weigh_rows(std::integral_constant<int, kRowsWeighed>{}, row);
    for (; row < end; ++row) weigh_rows(std::integral_constant<int, 1>{}, row);
  }
  products.sum_values(scratch.weights.data(), weight_stride, num_rows, stripes, prefetcher, half, shape.value_lanes(),
                      results, scratch.shares.data());
}

}  // namespace inflight
