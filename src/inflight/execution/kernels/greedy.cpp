#include "greedy.h"

#include <cmath>
#include <limits>
#include <vector>

#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

constexpr int64_t kPieceSize = 8192;  // columns that one thread looks at at a time

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

}  // namespace inflight
