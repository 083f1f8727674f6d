// The operators that Python sees, `torch.ops.inflight.*`. Objects that outlive a call are kept here, by number.

#include <torch/library.h>

#include <limits>
#include <mutex>
#include <unordered_map>

#include "activate.h"
#include "adapters.h"
#include "attention.h"
#include "exchange.h"
#include "experts.h"
#include "greedy.h"
#include "grouped.h"
#include "grouped_linear.h"
#include "linear.h"
#include "program.h"
#include "round.h"
#include "sample.h"
#include "threads.h"

namespace inflight::operators {

using at::Tensor;
template <class Value>
class Registry {
 public:
  int64_t add(std::shared_ptr<Value> value) {
    const std::lock_guard lock(mutex_);
    values_.emplace(++last_, std::move(value));
    return last_;
  }
  std::shared_ptr<Value> get(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(number);
    TORCH_CHECK(found != values_.end(), "there is nothing with number ", number, " (any more)");
    return found->second;
  }
  void remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    values_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Value>> values_;
  int64_t last_ = 0;
};

Registry<CurrentStep> steps;
Registry<Call> calls;
Registry<Linear> linears;
struct Experts {
  std::vector<Expert> experts;
  Activation activation;
};
Registry<Experts> mixtures;

int64_t new_step() { return steps.add(std::make_shared<CurrentStep>()); }
void delete_step(int64_t step) { steps.remove(step); }

void begin_step(int64_t step, int64_t block_size, const Tensor& query_lens, const Tensor& kv_lens,
                std::vector<Tensor> indices, std::vector<Tensor> tables) {
  inflight::begin_step(*steps.get(step), block_size, query_lens, kv_lens, indices, tables);
}

int64_t new_call(int64_t step, at::IntArrayRef sizes, double scale, double softcap, int64_t group, const Tensor& stored,
                 at::ScalarType dtype) {
  TORCH_CHECK(sizes.size() == 8, "an attention call has 8 sizes, not ", sizes.size());
  for (const int64_t size : sizes) TORCH_CHECK(size <= 1 << 24, "a size of ", size, " is too large");
  const inflight::Shape shape{int(sizes[0]), int(sizes[1]), int(sizes[2]), int(sizes[3]), float(scale),
                              sizes[4],      sizes[5],      float(softcap), int(sizes[6]), sizes[7] != 0};
  const auto call = std::make_shared<Call>(Call{shape, int(group), stored, dtype, steps.get(step)});
  inflight::check(*call);
  return calls.add(call);
}
void delete_call(int64_t call) { calls.remove(call); }

void write(const Tensor& key, const Tensor& value, int64_t call) { inflight::write(*calls.get(call), key, value); }

Tensor attend(const Tensor& query, const std::optional<Tensor>& sinks, int64_t call, int64_t) {
  return inflight::attend(*calls.get(call), query, sinks);
}

int64_t new_linear(const Tensor& panels, const std::optional<Tensor>& bias, const std::optional<Tensor>& scales,
                   int64_t in_features, int64_t out_features, std::string_view activation, std::string_view variant) {
  return linears.add(std::make_shared<Linear>(panels, bias, scales, in_features, out_features,
                                              find_activation(activation, variant)));
}
int64_t new_grouped_linear(const Tensor& panels, at::IntArrayRef layout, const std::optional<Tensor>& order,
                           bool is_exact, const std::optional<Tensor>& bias, int64_t in_features, int64_t out_features,
                           std::string_view activation, std::string_view variant) {
  return linears.add(std::make_shared<Linear>(panels, Grouped(layout), order, is_exact, bias, in_features, out_features,
                                              find_activation(activation, variant)));
}
void delete_linear(int64_t linear) { linears.remove(linear); }

Tensor linear(const Tensor& x, int64_t linear, int64_t) { return inflight::apply(*linears.get(linear), x); }

Registry<AdaptedStep> adapted_steps;
Registry<Adapter> adapters;

int64_t new_adapted_step() { return adapted_steps.add(std::make_shared<AdaptedStep>()); }
void delete_adapted_step(int64_t step) { adapted_steps.remove(step); }

void begin_adapted_step(int64_t step, at::IntArrayRef numbers, at::IntArrayRef of_tokens, at::IntArrayRef of_logits) {
  AdaptedStep& own = *adapted_steps.get(step);
  for (const at::IntArrayRef rows : {of_tokens, of_logits})
    for (const int64_t number : rows)
      TORCH_CHECK(number >= -1 && number < int64_t(numbers.size()), "there is no adapter ", number);
  const auto with_copies = [](at::IntArrayRef rows) {
    std::vector<int32_t> all(rows.begin(), rows.end());
    all.resize(rows.size() + AdaptedStep::kMostCopies, rows.empty() ? -1 : int32_t(rows.back()));
    return all;
  };
  own.adapters.clear();
  for (const int64_t number : numbers) own.adapters.push_back(adapters.get(number));
  own.of_tokens = with_copies(of_tokens);
  own.of_logits = with_copies(of_logits);
}

void adapt_linear(int64_t linear, int64_t step, int64_t place, bool reads_logit_rows) {
  linears.get(linear)->adapters = AdapterPlace{adapted_steps.get(step), place, reads_logit_rows};
}

int64_t new_adapter(int64_t num_places, at::IntArrayRef places, at::IntArrayRef first_outputs, at::IntArrayRef num_outputs,
                    const std::vector<Tensor>& downs, const std::vector<Tensor>& ups) {
  TORCH_CHECK(num_places >= 0 && num_places <= 1 << 24, "there cannot be ", num_places, " places");
  auto adapter = std::make_shared<Adapter>();
  adapter->places.resize(num_places);
  const size_t size = places.size();
  TORCH_CHECK(first_outputs.size() == size && num_outputs.size() == size && downs.size() == size && ups.size() == size,
              "an adapter's matrices come with a place each");
  for (size_t i = 0; i < size; ++i) {
    TORCH_CHECK(places[i] >= 0 && places[i] < num_places, "there is no place ", places[i]);
    adapter->places[places[i]].push_back({downs[i], ups[i], first_outputs[i], num_outputs[i]});
  }
  check(*adapter);
  return adapters.add(adapter);
}
void delete_adapter(int64_t adapter) { adapters.remove(adapter); }

Tensor adapted_rows(const Tensor& rows, const Tensor& ids, int64_t step, int64_t place) {
  return inflight::adapted_rows(rows, ids, {adapted_steps.get(step), place, false});
}

int64_t new_experts(at::IntArrayRef ups, at::IntArrayRef downs, std::string_view activation, std::string_view variant) {
  auto mixture = std::make_shared<Experts>(Experts{{}, find_activation(activation, variant)});
  TORCH_CHECK(ups.size() == downs.size(), "every expert has two projections");
  for (size_t i = 0; i < ups.size(); ++i) {
    const Expert& expert = mixture->experts.emplace_back(Expert{linears.get(ups[i]), linears.get(downs[i])});
    const bool is_gated = expert.up->out_features == 2 * expert.down->in_features;
    TORCH_CHECK((is_gated || !mixture->activation) && expert.down->out_features == expert.up->in_features,
                "an expert's projections do not fit each other");
  }
  return mixtures.add(mixture);
}
void delete_experts(int64_t experts) { mixtures.remove(experts); }

Tensor experts(const Tensor& x, const Tensor& chosen, int64_t number) {
  const auto mixture = mixtures.get(number);
  return inflight::run_experts(x, chosen, mixture->experts, mixture->activation);
}

Tensor experts_up(const Tensor& x, const Tensor& chosen, int64_t number, int64_t) {
  return project_up(x, chosen, mixtures.get(number)->experts);
}
Tensor experts_down(const Tensor& rows, const Tensor& chosen, int64_t number, int64_t) {
  return project_down(rows, chosen, mixtures.get(number)->experts);
}

Registry<Exchange> exchanges;

int64_t new_exchange(int64_t file, int64_t rank, int64_t num_ranks, int64_t place_bytes) {
  return exchanges.add(std::make_shared<Exchange>(file, rank, num_ranks, place_bytes));
}
void delete_exchange(int64_t exchange) { exchanges.remove(exchange); }
void begin_exchange(int64_t exchange, int64_t step) { exchanges.get(exchange)->begin(step); }
void give_up_exchange(int64_t exchange) { exchanges.get(exchange)->give_up(); }
bool is_exchange_given_up(int64_t exchange) { return exchanges.get(exchange)->is_given_up(); }
void end_exchange(int64_t exchange) { exchanges.get(exchange)->end(); }
Tensor sum_of_ranks(const Tensor& rows, int64_t exchange) { return exchanges.get(exchange)->sum(rows); }
Tensor gather_of_ranks(const Tensor& rows, int64_t exchange, int64_t) { return exchanges.get(exchange)->gather(rows); }

Registry<Program> programs;

int64_t new_program(at::IntArrayRef codes, at::ArrayRef<double> numbers, const std::vector<std::string>& words,
                    const std::vector<Tensor>& constants) {
  Reader reader(codes, numbers, words);
  return programs.add(std::make_shared<Program>(reader, constants, [](int64_t number) { return linears.get(number); }));
}
void delete_program(int64_t program) { programs.remove(program); }

std::vector<Tensor> run_program(const Tensor& input_ids, const Tensor& positions, const Tensor& logit_rows, int64_t program) {
  ProgramRun run(programs.get(program), input_ids, positions, logit_rows);
  while (run.advance(std::numeric_limits<int64_t>::max())) continue;
  return run.outputs();
}

Registry<ProgramRun> program_runs;

int64_t new_program_run(const Tensor& input_ids, const Tensor& positions, const Tensor& logit_rows, int64_t program) {
  return program_runs.add(std::make_shared<ProgramRun>(programs.get(program), input_ids, positions, logit_rows));
}
void delete_program_run(int64_t run) { program_runs.remove(run); }
bool advance_program_run(int64_t run, int64_t num_items) { return program_runs.get(run)->advance(num_items); }
std::vector<Tensor> outputs_of_program_run(int64_t run) { return program_runs.get(run)->outputs(); }

}  // namespace inflight::operators

TORCH_LIBRARY(inflight, library) {
  namespace ours = inflight::operators;
  library.def("num_lanes() -> int", [] { return int64_t(inflight::kLanes); });
  library.def("new_step() -> int", &ours::new_step);
  library.def("delete_step(int step) -> ()", &ours::delete_step);
  library.def("begin_step(int step, int block_size, Tensor query_lens, Tensor kv_lens, Tensor[] indices, Tensor[] tables) -> ()",
              &ours::begin_step);
  library.def("new_call(int step, int[] sizes, float scale, float softcap, int group, Tensor stored, "
              "ScalarType dtype) -> int",
              &ours::new_call);
  library.def("delete_call(int call) -> ()", &ours::delete_call);
  library.def("write(Tensor key, Tensor value, int call) -> ()");
  library.impl("write", c10::DispatchKey::CPU, &ours::write);
  library.def("attend(Tensor query, Tensor? sinks, int call, int value_head_size) -> Tensor");
  library.impl("attend", c10::DispatchKey::CPU, &ours::attend);
  library.def("has_panels(ScalarType dtype) -> bool", &inflight::has_panels);
  library.def("new_linear(Tensor panels, Tensor? bias, Tensor? scales, int in_features, int out_features, "
              "str activation, str variant) -> int",
              &ours::new_linear);
  library.def("multiplies_whole_numbers() -> bool", &inflight::multiplies_whole_numbers);
  library.def("prefers_whole_numbers() -> bool", &inflight::prefers_whole_numbers);
  library.def("pack_grouped(int[] layout, Tensor numbers, Tensor coarse, Tensor? fine, Tensor? coarse_minima, "
              "Tensor? fine_minima) -> Tensor",
              &inflight::pack_grouped);
  library.def("round_grouped(int[] layout, Tensor weight) -> Tensor", &inflight::round_grouped);
  library.def("grouped_rows(int[] layout, Tensor panels, Tensor rows, int out_features, int in_features, "
              "ScalarType dtype) -> Tensor");
  library.impl("grouped_rows", c10::DispatchKey::CPU, &inflight::grouped_rows);
  library.def("grouped_values(int[] layout, Tensor panels, int out_features, int in_features, ScalarType dtype) -> Tensor",
              &inflight::grouped_values);
  library.def("new_grouped_linear(Tensor panels, int[] layout, Tensor? order, bool is_exact, Tensor? bias, "
              "int in_features, int out_features, str activation, str variant) -> int",
              &ours::new_grouped_linear);
  library.def("delete_linear(int linear) -> ()", &ours::delete_linear);
  library.def("linear(Tensor x, int linear, int out_features) -> Tensor");
  library.impl("linear", c10::DispatchKey::CPU, &ours::linear);
  library.def("new_adapted_step() -> int", &ours::new_adapted_step);
  library.def("delete_adapted_step(int step) -> ()", &ours::delete_adapted_step);
  library.def("begin_adapted_step(int step, int[] adapters, int[] of_tokens, int[] of_logits) -> ()",
              &ours::begin_adapted_step);
  library.def("adapt_linear(int linear, int step, int place, bool reads_logit_rows) -> ()", &ours::adapt_linear);
  library.def("new_adapter(int num_places, int[] places, int[] first_outputs, int[] num_outputs, Tensor[] downs, "
              "Tensor[] ups) -> int",
              &ours::new_adapter);
  library.def("delete_adapter(int adapter) -> ()", &ours::delete_adapter);
  library.def("adapted_rows(Tensor rows, Tensor ids, int step, int place) -> Tensor");
  library.impl("adapted_rows", c10::DispatchKey::CPU, &ours::adapted_rows);
  library.def("new_experts(int[] ups, int[] downs, str activation, str variant) -> int", &ours::new_experts);
  library.def("delete_experts(int experts) -> ()", &ours::delete_experts);
  library.def("experts(Tensor x, Tensor chosen, int experts) -> Tensor");
  library.impl("experts", c10::DispatchKey::CPU, &ours::experts);
  library.def("experts_up(Tensor x, Tensor chosen, int experts, int out_features) -> Tensor");
  library.impl("experts_up", c10::DispatchKey::CPU, &ours::experts_up);
  library.def("experts_down(Tensor rows, Tensor chosen, int experts, int out_features) -> Tensor");
  library.impl("experts_down", c10::DispatchKey::CPU, &ours::experts_down);
  library.def("weighted_sum(Tensor rows, Tensor weights) -> Tensor");
  library.impl("weighted_sum", c10::DispatchKey::CPU, &inflight::weighted_sum);
  library.def("new_exchange(int file, int rank, int num_ranks, int place_bytes) -> int", &ours::new_exchange);
  library.def("delete_exchange(int exchange) -> ()", &ours::delete_exchange);
  library.def("begin_exchange(int exchange, int step) -> ()", &ours::begin_exchange);
  library.def("give_up_exchange(int exchange) -> ()", &ours::give_up_exchange);
  library.def("is_exchange_given_up(int exchange) -> bool", &ours::is_exchange_given_up);
  library.def("end_exchange(int exchange) -> ()", &ours::end_exchange);
  library.def("sum_of_ranks(Tensor rows, int exchange) -> Tensor");
  library.impl("sum_of_ranks", c10::DispatchKey::CPU, &ours::sum_of_ranks);
  library.def("gather_of_ranks(Tensor rows, int exchange, int num_ranks) -> Tensor");
  library.impl("gather_of_ranks", c10::DispatchKey::CPU, &ours::gather_of_ranks);
  library.def("activate(Tensor x, str activation, str variant) -> Tensor");
  library.impl("activate", c10::DispatchKey::CPU, &inflight::activate);
  library.def("scalar_type(ScalarType dtype) -> int", [](at::ScalarType dtype) { return int64_t(dtype); });
  library.def("new_program(int[] codes, float[] numbers, str[] words, Tensor[] constants) -> int", &ours::new_program);
  library.def("delete_program(int program) -> ()", &ours::delete_program);
  library.def("run_program(Tensor input_ids, Tensor positions, Tensor logit_rows, int program) -> Tensor[]",
              &ours::run_program);
  library.def("new_program_run(Tensor input_ids, Tensor positions, Tensor logit_rows, int program) -> int",
              &ours::new_program_run);
  library.def("delete_program_run(int run) -> ()", &ours::delete_program_run);
  library.def("advance_program_run(int run, int num_items) -> bool", &ours::advance_program_run);
  library.def("outputs_of_program_run(int run) -> Tensor[]", &ours::outputs_of_program_run);
  library.def("use_own_threads(bool are_used) -> ()", &inflight::use_own_threads);
  library.def("greedy(Tensor logits) -> Tensor", &inflight::greedy);
  library.def("sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
              &inflight::sample);
}
