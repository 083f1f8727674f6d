// Rows of queries attend to a tile of a paged cache: the arithmetic, on one thread.
//
// A tile is the tokens of a sequence between two fixed multiples of about 256 positions. Its results come by themselves:
// scores, their maximum, the sum of their exponentials and the weighted sum of values, in float32. What a row gets does
// not depend on which other rows are computed with it, nor on where its keys lie in memory; results of tiles are merged
// in order of position (`merge`). So a token's attention has the same bits alone, in a batch, in a chunk and after a hit.
#pragma once

#include <cmath>

#include "attend_matrix_unit.h"
#include "attend_vectors.h"

namespace inflight {

// Scores to weights, in place: scale, softcap, mask, exponential. Returns their maximum and sum.
template <class Kind>
Partial weigh(const Shape& shape, const std::vector<Stripe<Kind>>& stripes, Visible visible, float* scores) {
  Floats maxima = broadcast(-kInfinity);
  const Ints low = Ints{} + visible.low;
  for (size_t s = 0; s < stripes.size(); ++s) {
    const Stripe<Kind>& stripe = stripes[s];
    Floats score = load<Floats>(scores + s * kLanes) * shape.scale;
    if (stripe.key_scales) score *= load<Floats>(stripe.key_scales);
    if (shape.softcap != 0) score = tanh(score / shape.softcap) * shape.softcap;
    const int end = std::min(stripe.position + stripe.length, visible.high);
    if (stripe.position < visible.low || end < stripe.position + kLanes) {
      const Ints position = lane_numbers() + stripe.position;
      score = (position >= low) & (position < end) ? score : broadcast(-kInfinity);
    }
    store(scores + s * kLanes, score);
    maxima = max(maxima, score);
  }
  const float maximum = max_of_lanes(maxima);
  Floats sums{};
  for (size_t s = 0; s < stripes.size(); ++s) {
    Floats weight = exp(load<Floats>(scores + s * kLanes) - maximum);
    sums += weight;
    if (stripes[s].value_scales) {
      const Floats scaled = weight * load<Floats>(stripes[s].value_scales);
      weight = weight == 0.f ? Floats{} : scaled;  // masked keys may have any scale
    }
    store(scores + s * kLanes, weight);
  }
  return {maximum, sum_of_lanes(sums), nullptr};
}

// One thread's memory for the current tile.
template <class Kind>
struct TileScratch {
  std::vector<Stripe<Kind>> stripes, next;  // of this tile, and of the one that this thread is likely to see next
  std::vector<float> scores;
  std::vector<typename Kind::Operand> weights;
};

// Let rows of queries `[num_rows, query_stride]` attend to the stripes in `scratch`; `results[row].values` are
// `[value_lanes]` floats each.
template <class Kind>
void attend_tile(const Shape& shape, const typename Kind::Operand* queries, int64_t query_stride, int num_rows,
                 const Visible* visible, TileScratch<Kind>& scratch, Partial* results) {
  const auto& stripes = scratch.stripes;
  const int64_t score_stride = int64_t(stripes.size()) * kLanes, weight_stride = score_stride / Kind::kPack;
  const int steps = shape.key_steps(Kind::kPack), value_lanes = shape.value_lanes();
  // Half of the next tile is prefetched while scores are computed, half while values are summed.
  const int64_t stripe_bytes = StripeLayout<Kind>(shape).end, half = stripe_bytes / 2 + kLineBytes;
  Prefetcher<Kind> prefetcher(scratch.next, stripe_bytes);
  scratch.scores.resize(score_stride * num_rows);
  scratch.weights.resize(weight_stride * num_rows);
  Products<Kind>::score(queries, query_stride, num_rows, stripes, steps, prefetcher, half, scratch.scores.data(),
                        score_stride);
  for (int row = 0; row < num_rows; ++row) {
    float* scores = scratch.scores.data() + row * score_stride;
    float* values = results[row].values;
    if (visible[row].low >= visible[row].high) {
      results[row].max = results[row].sum = 0;
      std::fill_n(scores, score_stride, 0.f);
    } else {
      results[row] = weigh(shape, stripes, visible[row], scores);
      results[row].values = values;
    }
    Kind::pack(scores, int(score_stride), scratch.weights.data() + row * weight_stride);
  }
  Products<Kind>::sum_values(scratch.weights.data(), weight_stride, num_rows, stripes, prefetcher, half, value_lanes,
                             results);
}

// Add a later tile's result to that of all tiles before it. A tile that sees nothing (sum 0) changes nothing.
inline void merge(Partial& so_far, const Partial& next, int value_lanes) {
  if (next.sum == 0) return;
  if (so_far.sum == 0) {
    so_far.max = next.max, so_far.sum = next.sum;
    std::copy_n(next.values, value_lanes, so_far.values);
    return;
  }
  const float maximum = so_far.max < next.max ? next.max : so_far.max;
  const float old_weight = std::exp(so_far.max - maximum), new_weight = std::exp(next.max - maximum);
  so_far.max = maximum;
  so_far.sum = so_far.sum * old_weight + next.sum * new_weight;
  for (int lane = 0; lane < value_lanes; lane += kLanes)
    store(so_far.values + lane,
          load<Floats>(so_far.values + lane) * old_weight + load<Floats>(next.values + lane) * new_weight);
}

}  // namespace inflight
