// The products of rows with a tile's keys and values, in vector registers: a few rows and a few stripes, or a few vectors
// of dimensions, at a time.
#pragma once

#include "aligned.h"
#include "stripes.h"

namespace inflight {

constexpr int kVectorsAtOnce = 4;
#ifdef __AVX512F__
constexpr int kRowsAtOnce = 4;  // 16 sums, of 32 registers
#else
constexpr int kRowsAtOnce = 3;  // 12 sums, of 16 registers
#endif

// Of scores, in floats.
struct Strides {
  int64_t of_row, of_product;
};

// Rows whose scores are computed together, so that they stay in the L1 cache until they are weights.
constexpr int kRowsScored = 32;

// Calls function<rows> for rows [0, num_rows), as many at a time as registers hold.
template <class Function>
void by_rows(int num_rows, const Function& function) {
  int row = 0;
  for (; row + kRowsAtOnce <= num_rows; row += kRowsAtOnce) function(std::integral_constant<int, kRowsAtOnce>{}, row);
  if (row + 2 <= num_rows) function(std::integral_constant<int, 2>{}, row), row += 2;
  if (row < num_rows) function(std::integral_constant<int, 1>{}, row);
}

// Whether `add_products` is faster than the plain loops: with few registers, and rows enough to share what it loads.
template <int kRows>
constexpr bool kTakesTurns = kLanes < 16 && kRows >= 3;

// Adds to sums[row][v] the product of operands[row * stride] with the pack at `at(v)`. Beside the sums there are registers
// for a factor of each row and one vector, so the terms of a pack take turns.
template <class Kind, int kRows, int kCount, class At>
[[gnu::always_inline]] inline void add_products(const typename Kind::Operand* operands, int64_t stride, const At& at,
                                                Floats (&sums)[kRows][kCount]) {
  const auto add_term = [&](auto term) __attribute__((always_inline)) {
    Floats factors[kRows];
    for (int r = 0; r < kRows; ++r) {
      factors[r] = broadcast(Kind::template term<term>(operands[r * stride]));
      keep_in_register(factors[r]);
    }
    for (int v = 0; v < kCount; ++v) {
      Floats values = Kind::template load_term<term>(at(v));
      keep_in_register(values);
      for (int r = 0; r < kRows; ++r) sums[r][v] = fused(factors[r], values, sums[r][v]);
    }
  };
  add_term(std::integral_constant<int, 0>{});
  if constexpr (Kind::kPack == 2) add_term(std::integral_constant<int, 1>{});
}

// scores[row][stripe] = query[row] . keys[stripe], for kRows x kStripes. With each step `ahead` bytes are prefetched.
template <class Kind, int kRows, int kStripes, class Ahead>
inline void score_block(const typename Kind::Operand* queries, int64_t query_stride, const Stripe<Kind>* stripes,
                        int steps, Ahead& prefetcher, int64_t ahead, float* scores, int64_t score_stride) {
  Floats sums[kRows][kStripes] = {};
  for (int i = 0; i < steps; ++i) {
    const auto keys = [&](int s) { return stripes[s].keys + int64_t(i) * Kind::kUnits; };
    if constexpr (kTakesTurns<kRows>) {
      prefetcher.advance(ahead);
      add_products<Kind>(queries + i, query_stride, keys, sums);
    } else {
      prefetcher.advance(ahead);
      for (int s = 0; s < kStripes; ++s) {
        const auto panel = Kind::load_panel(keys(s));
        for (int r = 0; r < kRows; ++r)
          sums[r][s] = Kind::multiply_add(sums[r][s], queries[r * query_stride + i], panel);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int s = 0; s < kStripes; ++s) store(scores + r * score_stride + s * kLanes, sums[r][s]);
}

template <class Kind, int kRows, class Ahead>
void score_rows(const typename Kind::Operand* queries, int64_t query_stride, const std::vector<Stripe<Kind>>& stripes,
                int steps, Ahead& prefetcher, int64_t ahead, float* scores, int64_t score_stride) {
  const int num_stripes = int(stripes.size());
  int s = 0;
  for (; s + kStripesAtOnce <= num_stripes; s += kStripesAtOnce)
    score_block<Kind, kRows, kStripesAtOnce>(queries, query_stride, &stripes[s], steps, prefetcher, ahead,
                                             scores + s * kLanes, score_stride);
  for (; s < num_stripes; ++s)
    score_block<Kind, kRows, 1>(queries, query_stride, &stripes[s], steps, prefetcher, 0, scores + s * kLanes,
                                score_stride);
}

// weights[row] . values of all stripes, merged with results[row].values, for kRows rows and kVectors vectors of dimensions.
template <class Kind, int kRows, int kVectors, class Ahead>
inline void sum_values_block(const typename Kind::Operand* weights, int64_t weight_stride,
                             const std::vector<Stripe<Kind>>& stripes, Ahead& prefetcher, int64_t ahead,
                             int first_lane, int value_lanes, const Partial* results, const Shares* shares) {
  constexpr int kPack = Kind::kPack, kSteps = kLanes / kPack;
  const int64_t row_units = int64_t(value_lanes / kLanes) * Kind::kUnits;
  Floats sums[kRows][kVectors] = {};
  for (size_t s = 0; s < stripes.size(); ++s) {
    const auto* row = stripes[s].values + int64_t(first_lane / kLanes) * Kind::kUnits;
    const auto* weight = weights + s * kSteps;
    const int full = stripes[s].length / kPack;
    for (int i = 0; i < full; ++i, row += row_units) {
      prefetcher.advance(ahead);
      const auto values = [&](int v) { return row + v * Kind::kUnits; };
      if constexpr (kTakesTurns<kRows>) {
        add_products<Kind>(weight + i, weight_stride, values, sums);
      } else {
        for (int v = 0; v < kVectors; ++v) {
          const auto panel = Kind::load_panel(values(v));
          for (int r = 0; r < kRows; ++r)
            sums[r][v] = Kind::multiply_add(sums[r][v], weight[r * weight_stride + i], panel);
        }
      }
    }
    if (full * kPack < stripes[s].length)  // beside the last token lies what no token owns
      for (int v = 0; v < kVectors; ++v) {
        const auto panel = Kind::first_of_pack(Kind::load_panel(row + v * Kind::kUnits));
        for (int r = 0; r < kRows; ++r)
          sums[r][v] = Kind::multiply_add(sums[r][v], weight[r * weight_stride + full], panel);
      }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) shares[r].merge(results[r].values + first_lane + v * kLanes, sums[r][v]);
}

template <class Kind, int kRows, class Ahead>
void sum_values_of_rows(const typename Kind::Operand* weights, int64_t weight_stride,
                        const std::vector<Stripe<Kind>>& stripes, Ahead& prefetcher, int64_t ahead,
                        int value_lanes, const Partial* results, const Shares* shares) {
  int lane = 0;
  for (; lane + kVectorsAtOnce * kLanes <= value_lanes; lane += kVectorsAtOnce * kLanes)
    sum_values_block<Kind, kRows, kVectorsAtOnce>(weights, weight_stride, stripes, prefetcher, ahead, lane, value_lanes,
                                                  results, shares);
  for (; lane < value_lanes; lane += kLanes)
    sum_values_block<Kind, kRows, 1>(weights, weight_stride, stripes, prefetcher, ahead, lane, value_lanes, results,
                                     shares);
}

// The products of `attend_tile`, for any kind of cache. For many rows numbers that are multiplied as floats are expanded
// once, with the same bits.
template <class Kind>
class VectorProducts {
 public:
  using Operand = typename Kind::Operand;
  struct Denormals {};  // how a thread treats denormal numbers, as long as it lives

  explicit VectorProducts(bool has_many_rows) : expands_(has_many_rows) {}

  // Stripes whose tokens are the operands of one product, so that a row has weights for as many.
  static constexpr int kStripesOfProduct = 1;
  // From a row's scores to the next one's, and from the scores of a product's stripes to those of the next one. (Rows a
  // power of two apart would evict each other from the cache.)
  static Strides strides(int64_t num_stripes) { return {(num_stripes + 1) * kLanes, kLanes}; }

  static Floats exp2(Floats x) { return exp2_to_one(x); }

  // Scores are queries[row] . keys[stripe]. Meanwhile about `ahead` bytes of each of the next tile's stripes come out of
  // memory.
  void score(const Operand* queries, int64_t query_stride, int num_rows, const std::vector<Stripe<Kind>>& stripes,
             int steps, Prefetcher<Kind>& prefetcher, int64_t ahead, float* scores) {
    const int64_t stride = strides(stripes.size()).of_row;
    const auto score_all = [&](auto kind, const auto* queries, int64_t query_stride, const auto& stripes, int steps) {
      by_rows(num_rows, [&](auto rows, int row) {
        score_rows<decltype(kind), rows>(queries + row * query_stride, query_stride, stripes, steps, prefetcher,
                                         row ? 0 : ahead / steps, scores + row * stride, stride);
      });
    };
    if constexpr (kCanExpand)
      if (expands_) {
        if (floats_.empty()) expand<true>(stripes, steps, 1);
        return score_all(Float32{}, reinterpret_cast<const float*>(queries), 2 * query_stride, floats_, 2 * steps);
      }
    score_all(Kind{}, queries, query_stride, stripes, steps);
  }

  // Merges weights[row] . values of all stripes with results[row].values.
  void sum_values(const Operand* weights, int64_t weight_stride, int num_rows, const std::vector<Stripe<Kind>>& stripes,
                  Prefetcher<Kind>& prefetcher, int64_t ahead, int value_lanes, const Partial* results, const Shares* shares) {
    const auto sum_all = [&](auto kind, const auto* weights, int64_t weight_stride, const auto& stripes) {
      by_rows(num_rows, [&](auto rows, int row) {
        sum_values_of_rows<decltype(kind), rows>(weights + row * weight_stride, weight_stride, stripes, prefetcher,
                                                 ahead / (kLanes / decltype(kind)::kPack * kStripesAtOnce), value_lanes,
                                                 results + row, shares + row);
      });
    };
    if constexpr (kCanExpand)
      if (expands_) {
        expand<false>(stripes, value_lanes / Kind::kPack, value_lanes / kLanes);
        return sum_all(Float32{}, reinterpret_cast<const float*>(weights), 2 * weight_stride, floats_);
      }
    sum_all(Kind{}, weights, weight_stride, stripes);
  }

 private:
  static constexpr bool kCanExpand = std::is_base_of_v<FloatPairs, Kind>;

  // Expands the keys or values of stripes to `floats_`. A stripe has `num_vectors` vectors of packs; each pair of rows has
  // `vectors_of_row` of them.
  template <bool kIsKeys>
  void expand(const std::vector<Stripe<Kind>>& stripes, int num_vectors, int vectors_of_row) {
    thread_local AlignedVector<float> memory;
    memory.resize(std::max(memory.size(), stripes.size() * num_vectors * 2 * kLanes));
    floats_.clear();
    float* to = memory.data();
    for (const Stripe<Kind>& stripe : stripes) {
      floats_.push_back({to, to, nullptr, nullptr, stripe.position, stripe.length});
      const auto* from = kIsKeys ? stripe.keys : stripe.values;
      for (int row = 0; row < num_vectors; row += vectors_of_row, to += vectors_of_row * kLanes)
        for (int v = 0; v < vectors_of_row; ++v, from += Kind::kUnits, to += kLanes) {
          store(to, Kind::template load_term<0>(from));
          store(to + vectors_of_row * kLanes, Kind::template load_term<1>(from));
        }
    }
  }

  const bool expands_;
  std::vector<Stripe<Float32>> floats_;
};

}  // namespace inflight
