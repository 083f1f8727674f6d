#include "sample.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "convert.h"

namespace inflight {
namespace {

// Scores are at most 0 and the best one is 0. Buckets of equal width hold those above -kRange, the last one the rest.
constexpr int kNumBuckets = 2048;
constexpr float kRange = 32;

int bucket_of(float score) { return score > -kRange ? int(-score * (kNumBuckets / kRange)) : kNumBuckets - 1; }

// The least score that is kept when the best ones are taken until `weight` of them adds up to `wanted`. Only the bucket
// in which that happens is sorted.
template <class Weight>
float least_kept(const std::vector<float>& scores, float threshold, double wanted, const Weight& weight) {
  std::array<double, kNumBuckets> sums{};
  for (const float score : scores)
    if (score >= threshold) sums[bucket_of(score)] += weight(score);
  int bucket = 0;
  double so_far = 0;
  for (; bucket < kNumBuckets - 1 && so_far + sums[bucket] < wanted; ++bucket) so_far += sums[bucket];
  std::vector<float> members;
  for (const float score : scores)
    if (score >= threshold && bucket_of(score) == bucket) members.push_back(score);
  std::sort(members.begin(), members.end(), std::greater<>());
  for (const float score : members)
    if ((so_far += weight(score)) >= wanted) return score;
  return members.empty() ? threshold : members.back();
}

struct Parameters {
  float temperature;
  int64_t top_k;
  float top_p, min_p, uniform;
};

// Scores to weights in place; returns their sum. Below the threshold the weight is 0.
double weigh(std::vector<float>& scores, float threshold) {
  double total = 0;
  const int64_t size = int64_t(scores.size());
  for (int64_t i = 0; i < size; i += kLanes) {  // the vector is padded with -infinity
    const Floats score = load<Floats>(&scores[i]);
    const Floats weight = score >= threshold ? exp(score) : Floats{};
    store(&scores[i], weight);
    total += sum_of_lanes(weight);
  }
  return total;
}

template <class Input>
int64_t sample_row(const Input* logits, int64_t size, const Parameters& p, std::vector<float>& scores) {
  scores.assign(round_up(size, kLanes), -kInfinity);
  float best = -kInfinity;
  for (int64_t i = 0; i < size; ++i) {
    scores[i] = float(logits[i]);
    best = std::max(best, scores[i]);
  }
  for (int64_t i = 0; i < size; ++i) scores[i] = (scores[i] - best) / p.temperature;
  float threshold = -kInfinity;
  if (p.top_k > 0 && p.top_k < size)
    threshold = least_kept(scores, threshold, double(p.top_k), [](float) { return 1.0; });
  if (p.top_p < 1) {
    const auto weight = [](float score) { return double(std::exp(score)); };
    double total = 0;
    for (const float score : scores)
      if (score >= threshold) total += weight(score);
    threshold = least_kept(scores, threshold, p.top_p * total, weight);
  }
  if (p.min_p > 0) threshold = std::max(threshold, std::log(p.min_p));
  const double target = weigh(scores, threshold) * p.uniform;
  double so_far = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (scores[i] == 0) continue;
    last = i;
    if ((so_far += scores[i]) > target) break;
  }
  return last;
}

template <class Input>
void sample_rows(const at::Tensor& logits, const std::vector<Parameters>& parameters, int64_t* tokens) {
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores;
    for (int64_t row = begin; row < end; ++row)
      tokens[row] = sample_row(logits.const_data_ptr<Input>() + row * logits.stride(0), logits.size(1),
                               parameters[row], scores);
  });
}

}  // namespace

at::Tensor sample(const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_k,
                  const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& uniform) {
  const at::Tensor rows = logits.stride(-1) == 1 ? logits : logits.contiguous();
  std::vector<Parameters> parameters;
  for (int64_t row = 0; row < rows.size(0); ++row)
    parameters.push_back({temperature.const_data_ptr<float>()[row], top_k.const_data_ptr<int64_t>()[row],
                          top_p.const_data_ptr<float>()[row], min_p.const_data_ptr<float>()[row],
                          uniform.const_data_ptr<float>()[row]});
  at::Tensor tokens = at::empty({rows.size(0)}, rows.options().dtype(at::kLong));
  if (rows.scalar_type() == at::kFloat) {
    sample_rows<float>(rows, parameters, tokens.data_ptr<int64_t>());
  } else {
    TORCH_CHECK(rows.scalar_type() == at::kBFloat16, "logits must be float32 or bfloat16");
    sample_rows<at::BFloat16>(rows, parameters, tokens.data_ptr<int64_t>());
  }
  return tokens;
}

}  // namespace inflight
