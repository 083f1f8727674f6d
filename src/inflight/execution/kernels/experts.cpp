#include "experts.h"

#include <cstring>
#include <numeric>

#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

// Average rows per expert up to which it is memory-bound.
constexpr int64_t kFewRows = 8;
// With few elements one thread is faster than several.
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
Tensor gated(const Tensor& projected, Activation activation) {
  const int64_t num_rows = projected.size(0), size = projected.size(1) / 2;
  Tensor output = empty({num_rows, size}, projected.scalar_type());
  const Value* from = projected.const_data_ptr<Value>();
  Value* to = output.data_ptr<Value>();
  for_each_range(num_rows, std::max<int64_t>(1, kElementsAtOnce / std::max<int64_t>(size, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row)
                       apply_gate(from + row * 2 * size, size, activation, to + row * size);
                   });
  return output;
}

// Choices sorted by expert; within an expert they keep their order.
struct Deal {
  Tensor choices;
  std::vector<int64_t> firsts, order;  // of each expert, and after the last one; the number of each choice

  Deal(const Tensor& chosen, int64_t num_experts) : choices(chosen.contiguous()), firsts(num_experts + 1, 0) {
    check_strided(chosen, "choices", 2);
    CHECK(chosen.scalar_type() == kLong, "choices must be int64");
    const int64_t* expert_of = choices.const_data_ptr<int64_t>();
    const auto exists = [&](int64_t i) { return expert_of[i] >= 0 && expert_of[i] < num_experts; };
    for (int64_t i = 0; i < choices.numel(); ++i)
      if (exists(i)) ++firsts[expert_of[i] + 1];
    std::partial_sum(firsts.begin(), firsts.end(), firsts.begin());
    order.resize(firsts.back());
    std::vector<int64_t> next(firsts.begin(), firsts.end() - 1);
    for (int64_t i = 0; i < choices.numel(); ++i)
      if (exists(i)) order[next[expert_of[i]]++] = i;
  }

  // Calls `run(expert, first, count)` for each chosen expert: in parallel, if that keeps all threads busy and each
  // expert has few rows, which avoids synchronisation within experts.
  template <class Run>
  void for_each_expert(const Run& run) const {
    std::vector<size_t> chosen;
    for (size_t expert = 0; expert + 1 < firsts.size(); ++expert)
      if (firsts[expert] < firsts[expert + 1]) chosen.push_back(expert);
    const auto run_one = [&](int64_t i) {
      run(chosen[i], firsts[chosen[i]], firsts[chosen[i] + 1] - firsts[chosen[i]]);
    };
    const int64_t num_chosen = int64_t(chosen.size()), num_threads = thread_count();
    const int64_t num_turns = (num_chosen + num_threads - 1) / num_threads;
    if (4 * num_turns * num_threads <= 5 * num_chosen && firsts.back() <= kFewRows * num_chosen)
      return for_each_item(num_chosen, run_one);
    for (int64_t i = 0; i < num_chosen; ++i) run_one(i);
  }
};

// Calls `copy(i)` for each of `count` rows of a size.
template <class Copy>
void for_each_row(int64_t count, int64_t size, const Copy& copy) {
  for_each_range(count, std::max<int64_t>(1, kElementsAtOnce / std::max<int64_t>(size, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) copy(i);
                   });
}

// The tokens of `x` `[T, hidden]`, gathered by valid expert.
Tensor dealt(const Tensor& x, const Deal& deal) {
  check_rows(x, "tokens");
  check_size(deal.choices, "choices", 0, x.size(0));
  const Tensor tokens = x.contiguous();
  const int64_t size = tokens.size(1), row_bytes = size * tokens.element_size(), num_chosen = deal.choices.size(1);
  const auto num_rows = int64_t(deal.order.size());
  Tensor rows = empty({num_rows, size}, tokens.scalar_type());
  const auto* from = static_cast<const char*>(tokens.const_data_ptr());
  auto* to = static_cast<char*>(rows.data_ptr());
  for_each_row(num_rows, size, [&](int64_t i) {
    std::memcpy(to + i * row_bytes, from + deal.order[i] / num_chosen * row_bytes, row_bytes);
  });
  return rows;
}

// The adapter of each gathered row; none, if no row has one.
std::vector<int32_t> dealt_adapters(const Deal& deal, const Linear& layer) {
  const int64_t num_chosen = deal.choices.size(1);
  const int32_t* of_tokens = adapters_of_rows(layer, deal.choices.size(0));
  std::vector<int32_t> adapters;
  if (!of_tokens) return adapters;
  for (const int64_t choice : deal.order) adapters.push_back(of_tokens[choice / num_chosen]);
  return adapters;
}

// Those from `first` on.
const int32_t* from(const std::vector<int32_t>& adapters, int64_t first) {
  return adapters.empty() ? nullptr : adapters.data() + first;
}

// A row of `size` for each choice; 0 for invalid experts.
Tensor rows_of_choices(const Deal& deal, int64_t size, const Tensor& like) {
  const int64_t num_rows = deal.choices.numel();
  if (int64_t(deal.order.size()) == num_rows) return empty({num_rows, size}, like.scalar_type());
  return zeros({num_rows, size}, like.scalar_type());
}

// Applies an expert's second projection to its rows, and scatters the results to the choices.
void project_back(const Expert& expert, const Tensor& rows, const Deal& deal, const int32_t* adapters, int64_t first,
                  Tensor& output) {
  check_size(output, "a projection of experts", 1, expert.down->out_features);
  Tensor given = empty({rows.size(0), output.size(1)}, rows.scalar_type());
  apply_to(*expert.down, rows, adapters, given);
  const int64_t size = output.size(1), row_bytes = size * output.element_size();
  const auto* rows_given = static_cast<const char*>(given.const_data_ptr());
  auto* to = static_cast<char*>(output.data_ptr());
  for_each_row(rows.size(0), size, [&](int64_t i) {
    std::memcpy(to + deal.order[first + i] * row_bytes, rows_given + i * row_bytes, row_bytes);
  });
}

Tensor gated(const Tensor& projected, Activation activation) {
  return projected.scalar_type() == kFloat ? gated<float>(projected, activation)
                                               : gated<bfloat16>(projected, activation);
}

// A partial vector is computed like a whole one.
template <class Value>
void add_weighted(const Value* rows, const float* weights, int64_t num_rows, int64_t size, Value* to) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, size - i);
    Floats sum{};
    for (int64_t row = 0; row < num_rows; ++row) {
      float part[kLanes] = {};
      if (count < kLanes) read_floats(rows + row * size + i, count, part);
      const Floats values = count < kLanes ? load<Floats>(part) : load_floats(rows + row * size + i);
      sum = fused(values, broadcast(weights[row]), sum);
    }
    if (count == kLanes) {
      store_floats(sum, to + i);
      continue;
    }
    float lanes[kLanes];
    store(lanes, sum);
    for (int64_t lane = 0; lane < count; ++lane) store_float(lanes[lane], to + i + lane);
  }
}

}  // namespace

Tensor weighted_sum(const Tensor& rows, const Tensor& weights) {
  check_rows(rows, "rows of choices");
  check_rows(weights, "weights of choices");
  const int64_t num_tokens = weights.size(0), num_chosen = weights.size(1), size = rows.size(1);
  check_size(rows, "rows of choices", 0, num_tokens * num_chosen);
  const Tensor from = rows.contiguous(), factors = padded_rows(weights, num_chosen, kFloat);
  Tensor output = empty({num_tokens, size}, rows.scalar_type());
  const auto run = [&]<class Value>(Value* to) {
    for_each_row(num_tokens, size * num_chosen, [&](int64_t token) {
      add_weighted(from.const_data_ptr<Value>() + token * num_chosen * size,
                   factors.const_data_ptr<float>() + token * num_chosen, num_chosen, size, to + token * size);
    });
  };
  if (rows.scalar_type() == kFloat) run(output.data_ptr<float>());
  else run(output.data_ptr<bfloat16>());
  return output;
}

Tensor project_up(const Tensor& x, const Tensor& chosen, const std::vector<Expert>& experts) {
  CHECK(!experts.empty(), "there are no experts");
  const Deal deal(chosen, int64_t(experts.size()));
  const Tensor tokens = dealt(x, deal);
  const std::vector<int32_t> adapters = dealt_adapters(deal, *experts.front().up);
  Tensor output = rows_of_choices(deal, experts.front().up->out_features, x);
  deal.for_each_expert([&](size_t expert, int64_t first, int64_t count) {
    check_size(output, "a projection of experts", 1, experts[expert].up->out_features);
    Tensor rows = output.narrow(first, count);
    apply_to(*experts[expert].up, tokens.narrow(first, count), from(adapters, first), rows);
  });
  return output;
}

Tensor project_down(const Tensor& rows, const Tensor& chosen, const std::vector<Expert>& experts) {
  CHECK(!experts.empty(), "there are no experts");
  check_rows(rows, "rows of experts");
  const Deal deal(chosen, int64_t(experts.size()));
  check_size(rows, "rows of experts", 0, chosen.numel());
  const std::vector<int32_t> adapters = dealt_adapters(deal, *experts.front().down);
  Tensor output = rows_of_choices(deal, experts.front().down->out_features, rows);
  deal.for_each_expert([&](size_t expert, int64_t first, int64_t count) {
    project_back(experts[expert], rows.narrow(first, count), deal, from(adapters, first), first, output);
  });
  return output;
}

// Expert by expert, so that intermediate rows stay in a cache.
Tensor run_experts(const Tensor& x, const Tensor& chosen, const std::vector<Expert>& experts,
                       Activation activation) {
  CHECK(!experts.empty(), "there are no experts");
  CHECK(activation, "these experts have no usual gate");
  const Deal deal(chosen, int64_t(experts.size()));
  const Tensor tokens = dealt(x, deal);
  const std::vector<int32_t> adapters = dealt_adapters(deal, *experts.front().up);
  Tensor output = rows_of_choices(deal, tokens.size(1), x);
  deal.for_each_expert([&](size_t expert, int64_t first, int64_t count) {
    const Expert& own = experts[expert];
    Tensor projected = empty({count, own.up->out_features}, tokens.scalar_type());
    apply_to(*own.up, tokens.narrow(first, count), from(adapters, first), projected);
    project_back(own, gated(projected, activation), deal, from(adapters, first), first, output);
  });
  return output;
}

}  // namespace inflight
