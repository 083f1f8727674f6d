#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

// ------------------------------------------------------------------------------------------------ greedy

constexpr int64_t kPieceSize = 8192;  // columns per thread

struct Best {
  float value;
  int64_t token;
};

// For one piece: first the greatest value, by lanes; then its index. NaN is greater than everything.
template <class Input>
Best best_of_piece(const Input* row, int64_t begin, int64_t end) {
  Floats maxima = broadcast(-kInfinity);
  Ints has_nan{};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    const Floats values = load_floats(row + i);
    maxima = max(maxima, values);
    has_nan |= values != values;
  }
  float best = max_of_lanes(maxima);
  bool nan = false;
  for (int lane = 0; lane < kLanes; ++lane) nan |= has_nan[lane] != 0;
  for (; i < end; ++i) {
    const float value = float(row[i]);
    nan |= std::isnan(value);
    best = best < value ? value : best;
  }
  if (nan) return {std::numeric_limits<float>::quiet_NaN(), begin};
  for (i = begin; i < end; ++i)
    if (float(row[i]) == best) break;
  return {best, i};
}

template <class Input>
void greedy_rows(const Tensor& logits, Tensor& tokens) {
  const int64_t num_rows = logits.size(0), size = logits.size(1), num_pieces = (size + kPieceSize - 1) / kPieceSize;
  const Input* data = logits.data_ptr<Input>();
  std::vector<Best> best(num_rows * num_pieces);
  for_each_range(num_rows * num_pieces, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % num_pieces * kPieceSize;
      best[i] = best_of_piece(data + i / num_pieces * logits.stride(0), begin, std::min(begin + kPieceSize, size));
    }
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    Best winner = best[row * num_pieces];
    for (int64_t piece = 1; piece < num_pieces; ++piece) {
      const Best& other = best[row * num_pieces + piece];
      if (!std::isnan(winner.value) && !(other.value <= winner.value)) winner = other;
    }
    tokens.data_ptr<int64_t>()[row] = std::isfinite(winner.value) ? winner.token : -1;
  }
}

// ------------------------------------------------------------------------------------------------ random

constexpr int64_t kChunkSize = 64;  // tokens whose greatest score and whose weights' sum are kept
constexpr int kNumBuckets = 1024;
constexpr float kMaxRange = 88;  // of scores: below, they have no weight

struct Parameters {
  float temperature;
  int64_t top_k;
  float top_p, min_p, uniform;
};

struct Candidate {
  float score, weight;
};

// One row on its way from logits to a token. Scores are logits less the best one, by the temperature; weights are their
// exponentials. Chunks are whole: padding has no weight.
struct Row {
  std::vector<float> scores, weights, maxima;
  std::vector<double> sums, buckets;
  std::vector<Candidate> candidates;
};

// False if any score is NaN.
template <class Input>
bool score(const Input* logits, int64_t size, float temperature, Row& row) {
  Floats maxima = broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) maxima = max(maxima, load_floats(logits + i));
  float best = max_of_lanes(maxima);
  for (; i < size; ++i) best = std::max(best, float(logits[i]));
  const int64_t num_chunks = (size + kChunkSize - 1) / kChunkSize;
  row.scores.resize(num_chunks * kChunkSize), row.weights.resize(num_chunks * kChunkSize);
  for (i = 0; i + kLanes <= size; i += kLanes)
    store(&row.scores[i], (load_floats(logits + i) - best) / broadcast(temperature));
  for (; i < size; ++i) row.scores[i] = (float(logits[i]) - best) / temperature;
  std::fill(row.scores.begin() + size, row.scores.end(), -kInfinity);
  Ints missing{};
  for (i = 0; i < num_chunks * kChunkSize; i += kLanes) {
    const Floats scores = load<Floats>(&row.scores[i]);
    missing |= scores != scores;
    store(&row.weights[i], exp(scores));
  }
  return !any(missing);
}

// Drop the weight of every token with a lower score, and sum up the chunks.
void cut(Row& row, float threshold) {
  row.sums.clear();
  for (size_t chunk = 0; chunk < row.scores.size(); chunk += kChunkSize) {
    Floats sum{};
    for (size_t i = chunk; i < chunk + kChunkSize; i += kLanes) {
      const Floats weight = load<Floats>(&row.scores[i]) >= threshold ? load<Floats>(&row.weights[i]) : Floats{};
      store(&row.weights[i], weight);
      sum += weight;
    }
    row.sums.push_back(sum_of_lanes(sum));
  }
}

double total(const Row& row) {
  double total = 0;
  for (const double sum : row.sums) total += sum;
  return total;
}

// Collects the tokens whose scores `belong`, a vector at a time; a token without weight never does.
template <class Belongs>
void collect(Row& row, const Belongs& belongs) {
  row.candidates.clear();
  for (size_t i = 0; i < row.scores.size(); i += kLanes) {
    const Ints kept = belongs(load<Floats>(&row.scores[i])) & (load<Floats>(&row.weights[i]) > 0.f);
    if (!any(kept)) continue;
    for (int lane = 0; lane < kLanes; ++lane)
      if (kept[lane]) row.candidates.push_back({row.scores[i + lane], row.weights[i + lane]});
  }
}

// The k-th greatest score. It is at least the k-th greatest of the chunks' maxima, so only few have to be examined.
float top_k_threshold(Row& row, int64_t k) {
  row.maxima.clear();
  for (size_t chunk = 0; chunk < row.scores.size(); chunk += kChunkSize) {
    Floats maxima = load<Floats>(&row.scores[chunk]);
    for (size_t i = chunk + kLanes; i < chunk + kChunkSize; i += kLanes)
      maxima = max(maxima, load<Floats>(&row.scores[i]));
    row.maxima.push_back(max_of_lanes(maxima));
  }
  const auto kth = [k](std::vector<float>& values) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
    return values[k - 1];
  };
  const float least = k <= int64_t(row.maxima.size()) ? kth(row.maxima) : -kInfinity;
  collect(row, [=](Floats scores) { return scores >= least; });
  if (int64_t(row.candidates.size()) < k) return -kInfinity;
  row.maxima.clear();
  for (const Candidate& candidate : row.candidates) row.maxima.push_back(candidate.score);
  return kth(row.maxima);
}

// The least score that is kept when the best ones are taken until their weights add up to a share of all. Buckets of
// equal width hold the scores; only the bucket in which that happens is sorted. All tokens below the
// buckets together weigh less than what is left out.
float top_p_threshold(Row& row, float top_p) {
  const double sum = total(row), wanted = top_p * sum;
  const float range = std::min(kMaxRange, float(std::log(double(row.scores.size()) / ((1 - top_p) * sum))) + 1e-3f);
  const float factor = kNumBuckets / std::max(range, 1e-3f);
  const auto buckets_of = [=](Floats scores) {
    return __builtin_convertvector(min(-scores * factor, broadcast(kNumBuckets)), Ints);
  };
  row.buckets.assign(kNumBuckets + 1, 0);  // the last one is of those below
  for (size_t i = 0; i < row.scores.size(); i += kLanes) {
    if (!any(load<Floats>(&row.weights[i]) > 0.f)) continue;
    int32_t buckets[kLanes];
    store(buckets, buckets_of(load<Floats>(&row.scores[i])));
    for (int lane = 0; lane < kLanes; ++lane) row.buckets[buckets[lane]] += row.weights[i + lane];
  }
  int bucket = 0;
  double above = 0;
  for (; bucket < kNumBuckets && above + row.buckets[bucket] < wanted; ++bucket) above += row.buckets[bucket];
  collect(row, [=](Floats scores) { return buckets_of(scores) == bucket; });
  auto& members = row.candidates;
  std::sort(members.begin(), members.end(), [](auto& a, auto& b) { return a.score > b.score; });
  for (const Candidate& member : members)
    if ((above += member.weight) >= wanted) return member.score;
  return members.empty() ? -kInfinity : members.back().score;
}

int64_t draw(const Row& row, float uniform) {
  const double target = total(row) * uniform;
  double before = 0;
  for (size_t chunk = 0; chunk < row.sums.size(); before += row.sums[chunk++]) {
    if (before + row.sums[chunk] <= target) continue;
    double so_far = before;
    for (int64_t i = chunk * kChunkSize; i < int64_t(chunk + 1) * kChunkSize; ++i)
      if ((so_far += row.weights[i]) > target && row.weights[i] > 0) return i;
  }
  int64_t last = row.weights.size() - 1;  // only rounding leads here
  while (last > 0 && row.weights[last] == 0) --last;
  return last;
}

template <class Input>
int64_t sample_row(const Input* logits, int64_t size, const Parameters& p, Row& row) {
  if (!score(logits, size, p.temperature, row)) return 0;
  cut(row, p.top_k > 0 && p.top_k < size ? top_k_threshold(row, p.top_k) : -kInfinity);
  if (p.top_p < 1) cut(row, top_p_threshold(row, p.top_p));
  if (p.min_p > 0) cut(row, std::log(p.min_p));
  return draw(row, p.uniform);
}

template <class Input>
void sample_rows(const Tensor& logits, const std::vector<Parameters>& parameters, int64_t* tokens) {
  for_each_range(logits.size(0), 1, [&](int64_t begin, int64_t end) {
    thread_local Row scratch;
    for (int64_t row = begin; row < end; ++row)
      tokens[row] = sample_row(logits.const_data_ptr<Input>() + row * logits.stride(0), logits.size(1),
                               parameters[row], scratch);
  });
}

}  // namespace

Tensor greedy(const Tensor& logits) {
  check_rows(logits, "logits");
  const Tensor rows = logits.stride(-1) == 1 ? logits : logits.contiguous();
  Tensor tokens = empty({rows.size(0)}, kLong);
  if (rows.scalar_type() == kFloat) {
    greedy_rows<float>(rows, tokens);
  } else {
    CHECK(rows.scalar_type() == kBFloat16, "logits must be float32 or bfloat16");
    greedy_rows<bfloat16>(rows, tokens);
  }
  return tokens;
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                  const Tensor& top_p, const Tensor& min_p, const Tensor& uniform) {
  check_rows(logits, "logits");
  const auto check_parameter = [&](const Tensor& parameter, const char* name, ScalarType dtype) {
    check_whole(parameter, name, 1, dtype);
    check_size(parameter, name, 0, logits.size(0));
  };
  check_parameter(temperature, "temperature", kFloat);
  check_parameter(top_k, "top_k", kLong);
  check_parameter(top_p, "top_p", kFloat);
  check_parameter(min_p, "min_p", kFloat);
  check_parameter(uniform, "uniform", kFloat);
  const Tensor rows = logits.stride(-1) == 1 ? logits : logits.contiguous();
  std::vector<Parameters> parameters;
  for (int64_t row = 0; row < rows.size(0); ++row)
    parameters.push_back({temperature.const_data_ptr<float>()[row], top_k.const_data_ptr<int64_t>()[row],
                          top_p.const_data_ptr<float>()[row], min_p.const_data_ptr<float>()[row],
                          uniform.const_data_ptr<float>()[row]});
  Tensor tokens = empty({rows.size(0)}, kLong);
  if (rows.scalar_type() == kFloat) {
    sample_rows<float>(rows, parameters, tokens.data_ptr<int64_t>());
  } else {
    CHECK(rows.scalar_type() == kBFloat16, "logits must be float32 or bfloat16");
    sample_rows<bfloat16>(rows, parameters, tokens.data_ptr<int64_t>());
  }
  return tokens;
}

}  // namespace inflight
