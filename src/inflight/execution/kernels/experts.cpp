#include "experts.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <numeric>

#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

// One thread is faster with few elements than several.
constexpr int64_t kElementsAtOnce = 16384;

// `to[i] = activation(row[i]) * row[size + i]`, rounded as the two steps would be; a partial vector is computed like
// a whole one.
template <class Value>
void apply_gate(const Value* row, int64_t size, Activation activation, Value* to) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, size - i);
    float gate[kLanes] = {}, factor[kLanes] = {};
    read_floats(row + i, count, gate);
    read_floats(row + size + i, count, factor);
    store(gate, activation(load<Floats>(gate)));
    for (int64_t lane = 0; lane < count; ++lane) {
      Value rounded;
      store_float(gate[lane], &rounded);
      store_float(float(rounded) * factor[lane], to + i + lane);
    }
  }
}

template <class Value>
at::Tensor gated(const at::Tensor& projected, Activation activation) {
  const int64_t num_rows = projected.size(0), size = projected.size(1) / 2;
  at::Tensor output = at::empty({num_rows, size}, projected.options());
  const Value* from = projected.const_data_ptr<Value>();
  Value* to = output.data_ptr<Value>();
  at::parallel_for(0, num_rows, std::max<int64_t>(1, kElementsAtOnce / std::max<int64_t>(size, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row)
                       apply_gate(from + row * 2 * size, size, activation, to + row * size);
                   });
  return output;
}

}  // namespace

at::Tensor run_experts(const at::Tensor& x, const at::Tensor& chosen, const std::vector<Expert>& experts,
                       Activation activation) {
  check_rows(x, "tokens");
  check_strided(chosen, "choices", 2);
  check_size(chosen, "choices", 0, x.size(0));
  const at::Tensor tokens = x.contiguous(), choices = chosen.contiguous();
  const int64_t num_choices = choices.numel(), num_chosen = choices.size(1), num_experts = int64_t(experts.size());
  const size_t row_bytes = tokens.size(1) * tokens.element_size();
  const int64_t* expert_of = choices.const_data_ptr<int64_t>();
  const auto exists = [&](int64_t choice) { return expert_of[choice] >= 0 && expert_of[choice] < num_experts; };
  // Choices sorted by expert; within an expert they keep their order.
  std::vector<int64_t> firsts(num_experts + 1, 0);
  for (int64_t i = 0; i < num_choices; ++i)
    if (exists(i)) ++firsts[expert_of[i] + 1];
  std::partial_sum(firsts.begin(), firsts.end(), firsts.begin());
  std::vector<int64_t> order(firsts.back()), next(firsts.begin(), firsts.end() - 1);
  for (int64_t i = 0; i < num_choices; ++i)
    if (exists(i)) order[next[expert_of[i]]++] = i;

  at::Tensor together = at::empty({int64_t(order.size()), tokens.size(1)}, tokens.options());
  at::Tensor output = at::empty({num_choices, tokens.size(1)}, tokens.options());
  if (int64_t(order.size()) < num_choices) output.zero_();
  const auto* from = static_cast<const char*>(tokens.const_data_ptr());
  auto *gathered = static_cast<char*>(together.data_ptr()), *to = static_cast<char*>(output.data_ptr());
  const int64_t rows_at_once = std::max<int64_t>(1, kElementsAtOnce / std::max<int64_t>(tokens.size(1), 1));
  at::parallel_for(0, int64_t(order.size()), rows_at_once, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(gathered + i * row_bytes, from + order[i] / num_chosen * row_bytes, row_bytes);
  });
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t first = firsts[expert], count = firsts[expert + 1] - first;
    if (count == 0) continue;
    const at::Tensor projected = apply(*experts[expert].up, together.narrow(0, first, count));
    const at::Tensor inner = projected.scalar_type() == at::kFloat ? gated<float>(projected, activation)
                                                                   : gated<at::BFloat16>(projected, activation);
    const at::Tensor given = apply(*experts[expert].down, inner);
    const auto* rows = static_cast<const char*>(given.const_data_ptr());
    at::parallel_for(0, count, rows_at_once, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        std::memcpy(to + order[first + i] * row_bytes, rows + i * row_bytes, row_bytes);
    });
  }
  return output;
}

}  // namespace inflight
