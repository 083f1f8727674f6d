// Rows of queries attend to a tile of a paged cache: the arithmetic, on one thread.
//
// A tile is the tokens of a sequence between two fixed multiples of about 256 positions. Its results come by themselves:
// scores, their maximum, the sum of their exponentials and the weighted sum of values, in float32. What a row gets does
// not depend on which other rows are computed with it, nor on where its keys lie in memory; results of tiles are merged
// in order of position (`merge`). So a token's attention has the same bits alone, in a batch, in a chunk and after a hit.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "stored.h"

namespace inflight {

constexpr int kTileSize = 256;
constexpr int64_t kLineBytes = 64;  // of the processor's cache
constexpr int kStripesAtOnce = 4, kVectorsAtOnce = 4;
#ifdef __AVX512F__
constexpr int kRowsAtOnce = 4;  // 16 sums, of 32 registers
#else
constexpr int kRowsAtOnce = 2;  // 8 sums, of 16 registers
#endif

// An attention call of the model: its shape, and where its keys and values lie.
//
// A block holds, for each key/value head, stripes of kLanes tokens (the last one partly used, if the block size is no
// multiple of that): `[N, Hkv, stripes, bytes of a stripe]`. A stripe is one piece of memory and holds, in
// this order:
// - keys `[Dk / pack, lanes, pack]`: one token a lane;
// - values `[lanes / pack, Dv, pack]`: one dimension a lane, Dv rounded up to lanes;
// - for int8, the scales of the keys and then those of the values, `[lanes]` floats each, one for each token and head.
struct Shape {
  int num_heads, num_kv_heads, head_size, value_head_size;
  float scale;
  int64_t window, chunk;  // 0: none
  float softcap;          // 0: none
  int block_size;

  int group_size() const { return num_heads / num_kv_heads; }
  int stripes_per_block() const { return (block_size + kLanes - 1) / kLanes; }
  int blocks_per_tile() const { return std::max(1, kTileSize / block_size); }
  int64_t tile_size() const { return int64_t(blocks_per_tile()) * block_size; }
  int key_steps(int pack) const { return (head_size + pack - 1) / pack; }
  int value_lanes() const { return int(round_up(value_head_size, kLanes)); }
  // The first position that a query sees; it sees no later one than its own.
  int64_t first_visible(int64_t position) const {
    int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return chunk ? std::max(first, position / chunk * chunk) : first;
  }
};

template <class Kind>
struct Stripe {
  typename Kind::Stored *keys, *values;
  float *key_scales, *value_scales;  // only of int8
  int position;                      // of its first token, from the tile's first
  int length;                        // tokens that belong to the sequence
};

// Where the parts of a stripe begin, and where it ends: in bytes.
template <class Kind>
struct StripeLayout {
  static constexpr int64_t kScaleBytes = std::is_same_v<typename Kind::Stored, int8_t> ? kLanes * sizeof(float) : 0;
  const int64_t values, key_scales, value_scales, end;

  explicit StripeLayout(const Shape& shape)
      : values(int64_t(shape.key_steps(Kind::kPack)) * Kind::kPack * kLanes * sizeof(typename Kind::Stored)),
        key_scales(values + int64_t(shape.value_lanes()) * kLanes * sizeof(typename Kind::Stored)),
        value_scales(key_scales + kScaleBytes),
        end(value_scales + kScaleBytes) {}
};

// All stripes of an attention call, by number.
template <class Kind>
struct Storage {
  char* memory;
  StripeLayout<Kind> layout;

  Stripe<Kind> stripe(int64_t number) const {
    using Stored = typename Kind::Stored;
    char* begin = memory + number * layout.end;
    const auto scales = [&](int64_t at) { return layout.kScaleBytes ? reinterpret_cast<float*>(begin + at) : nullptr; };
    return {reinterpret_cast<Stored*>(begin), reinterpret_cast<Stored*>(begin + layout.values),
            scales(layout.key_scales), scales(layout.value_scales), 0, kLanes};
  }
};

// What some tokens contribute to a row: `values` are weighted with exp(score - max), `sum` is the sum of the weights.
struct Partial {
  float max, sum;
  float* values;
};

// The keys that a row sees: positions from the tile's first, [low, high).
struct Visible {
  int low, high;
};

// Prefetches the stripes of the next tile while one is computed: the blocks of a sequence lie scattered, so the hardware
// cannot foresee them. It takes a few stripes at a time, line by line, a few lines with each step of the computation,
// into the L2 cache, which can wait for more lines at once than L1; nor would a tile fit into L1.
template <class Kind>
class Prefetcher {
 public:
  Prefetcher(const std::vector<Stripe<Kind>>& stripes, int64_t stripe_bytes)
      : next_(stripes.data()), end_(next_ + stripes.size()), stripe_bytes_(stripe_bytes), offset_(stripe_bytes), asked_(stripe_bytes) {}

  // The next `num_bytes` of kStripesAtOnce stripes each.
  void advance(int64_t num_bytes) {
    for (asked_ += num_bytes; offset_ < asked_; offset_ += kLineBytes) {
      if (offset_ >= stripe_bytes_ && !begin_stripes()) return;
      for (const char* stripe : stripes_) __builtin_prefetch(stripe + offset_, 0, 2);
    }
  }

 private:
  bool begin_stripes() {
    if (next_ >= end_) return false;
    for (int s = 0; s < kStripesAtOnce; ++s)
      stripes_[s] = reinterpret_cast<const char*>(std::min(next_ + s, end_ - 1)->keys);
    next_ += kStripesAtOnce;
    asked_ -= stripe_bytes_, offset_ -= stripe_bytes_;
    return true;
  }

  const Stripe<Kind>*next_, *end_;
  const int64_t stripe_bytes_;
  int64_t offset_, asked_;  // in `stripes_`: what was asked for, and what should be
  const char* stripes_[kStripesAtOnce] = {};
};

template <class Kind>
void collect_stripes(const Shape& shape, const Storage<Kind>& storage, const int32_t* blocks, int kv_head, int low,
                     int high, std::vector<Stripe<Kind>>& stripes) {
  const int per_block = shape.stripes_per_block(), block_size = shape.block_size;
  stripes.clear();
  for (int block = low / block_size; block * block_size < high; ++block) {
    const int64_t first = (int64_t(blocks[block]) * shape.num_kv_heads + kv_head) * per_block;
    for (int part = 0; part < per_block; ++part) {
      const int position = block * block_size + part * kLanes;
      const int length = std::min({kLanes, block_size - part * kLanes, high - position});
      if (length <= 0 || position + length <= low) continue;
      stripes.push_back(storage.stripe(first + part));
      stripes.back().position = position, stripes.back().length = length;
    }
  }
}

// scores[row][stripe] = query[row] . keys[stripe], for kRows x kStripes. With each step `ahead` bytes are prefetched.
template <class Kind, int kRows, int kStripes>
inline void score_block(const typename Kind::Operand* queries, int64_t query_stride, const Stripe<Kind>* stripes,
                        int steps, Prefetcher<Kind>& prefetcher, int64_t ahead, float* scores, int64_t score_stride) {
  Floats sums[kRows][kStripes] = {};
  for (int i = 0; i < steps; ++i) {
    typename Kind::Panel panels[kStripes];
    for (int s = 0; s < kStripes; ++s)
      panels[s] = Kind::load_panel(stripes[s].keys + int64_t(i) * kLanes * Kind::kPack);
    prefetcher.advance(ahead);
    for (int r = 0; r < kRows; ++r) {
      const auto operand = queries[r * query_stride + i];
      for (int s = 0; s < kStripes; ++s) sums[r][s] = Kind::multiply_add(sums[r][s], operand, panels[s]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int s = 0; s < kStripes; ++s) store(scores + r * score_stride + s * kLanes, sums[r][s]);
}

template <class Kind, int kRows>
void score_rows(const typename Kind::Operand* queries, int64_t query_stride, const std::vector<Stripe<Kind>>& stripes,
                int steps, Prefetcher<Kind>& prefetcher, int64_t ahead, float* scores, int64_t score_stride) {
  const int num_stripes = int(stripes.size());
  int s = 0;
  for (; s + kStripesAtOnce <= num_stripes; s += kStripesAtOnce)
    score_block<Kind, kRows, kStripesAtOnce>(queries, query_stride, &stripes[s], steps, prefetcher, ahead,
                                             scores + s * kLanes, score_stride);
  for (; s < num_stripes; ++s)
    score_block<Kind, kRows, 1>(queries, query_stride, &stripes[s], steps, prefetcher, 0, scores + s * kLanes,
                                score_stride);
}

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

// results[row].values = weights[row] . values of all stripes, for kRows rows and kVectors vectors of dimensions.
template <class Kind, int kRows, int kVectors>
inline void sum_values_block(const typename Kind::Operand* weights, int64_t weight_stride,
                             const std::vector<Stripe<Kind>>& stripes, Prefetcher<Kind>& prefetcher, int64_t ahead,
                             int first_lane, int value_lanes, const Partial* results) {
  constexpr int kPack = Kind::kPack, kSteps = kLanes / kPack;
  Floats sums[kRows][kVectors] = {};
  for (size_t s = 0; s < stripes.size(); ++s) {
    const auto* row = stripes[s].values + int64_t(first_lane) * kPack;
    const auto* weight = weights + s * kSteps;
    const int full = stripes[s].length / kPack;
    for (int i = 0; i < full; ++i, row += int64_t(value_lanes) * kPack) {
      prefetcher.advance(ahead);
      for (int v = 0; v < kVectors; ++v) {
        const auto panel = Kind::load_panel(row + v * kLanes * kPack);
        for (int r = 0; r < kRows; ++r)
          sums[r][v] = Kind::multiply_add(sums[r][v], weight[r * weight_stride + i], panel);
      }
    }
    if (full * kPack < stripes[s].length)  // beside the last token lies what belongs to nobody
      for (int v = 0; v < kVectors; ++v) {
        const auto panel = Kind::load_first_of_pack(row + v * kLanes * kPack);
        for (int r = 0; r < kRows; ++r)
          sums[r][v] = Kind::multiply_add(sums[r][v], weight[r * weight_stride + full], panel);
      }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(results[r].values + first_lane + v * kLanes, sums[r][v]);
}

template <class Kind, int kRows>
void sum_values(const typename Kind::Operand* weights, int64_t weight_stride, const std::vector<Stripe<Kind>>& stripes,
                Prefetcher<Kind>& prefetcher, int64_t ahead, int value_lanes, const Partial* results) {
  int lane = 0;
  for (; lane + kVectorsAtOnce * kLanes <= value_lanes; lane += kVectorsAtOnce * kLanes)
    sum_values_block<Kind, kRows, kVectorsAtOnce>(weights, weight_stride, stripes, prefetcher, ahead, lane, value_lanes,
                                                  results);
  for (; lane < value_lanes; lane += kLanes)
    sum_values_block<Kind, kRows, 1>(weights, weight_stride, stripes, prefetcher, ahead, lane, value_lanes, results);
}

// Calls function<rows> for rows [0, num_rows), as many at a time as registers hold.
template <class Function>
void by_rows(int num_rows, const Function& function) {
  int row = 0;
  for (; row + kRowsAtOnce <= num_rows; row += kRowsAtOnce) function(std::integral_constant<int, kRowsAtOnce>{}, row);
  if (row + 2 <= num_rows) function(std::integral_constant<int, 2>{}, row), row += 2;
  if (row < num_rows) function(std::integral_constant<int, 1>{}, row);
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
  const int64_t ahead_of_scores = half / steps, ahead_of_values = half / (kLanes / Kind::kPack * kStripesAtOnce);
  Prefetcher<Kind> prefetcher(scratch.next, stripe_bytes);
  scratch.scores.resize(score_stride * num_rows);
  scratch.weights.resize(weight_stride * num_rows);
  by_rows(num_rows, [&](auto rows, int row) {
    const auto* these = queries + row * query_stride;
    float* scores = scratch.scores.data() + row * score_stride;
    score_rows<Kind, rows>(these, query_stride, stripes, steps, prefetcher, row ? 0 : ahead_of_scores, scores, score_stride);
  });
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
  by_rows(num_rows, [&](auto rows, int row) {
    sum_values<Kind, rows>(scratch.weights.data() + row * weight_stride, weight_stride, stripes, prefetcher, ahead_of_values,
                           value_lanes, results + row);
  });
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
