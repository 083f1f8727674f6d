// The operators `torch.ops.inflight.*`. Objects that outlive a call are kept here, by handle.

#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "activate.h"
#include "adapters.h"
#include "attention.h"
#include "exchange.h"
#include "experts.h"
#include "gguf_blocks.h"
#include "grouped.h"
#include "grouped_linear.h"
#include "linear.h"
#include "mixers.h"
#include "placing.h"
#include "program.h"
#include "sample.h"
#include "threads.h"

namespace inflight::operators {
namespace {

// Objects by handle.
class Objects {
 public:
  int64_t add(std::shared_ptr<void> object) {
    const std::lock_guard lock(mutex_);
    objects_.emplace(++last_, std::move(object));
    return last_;
  }
  std::shared_ptr<void> get(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(number);
    CHECK(found != objects_.end(), "there is nothing with number ", number, " (any more)");
    return found->second;
  }
  void remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    objects_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<void>> objects_;
  int64_t last_ = 0;
};

// The same, of one type.
template <class Value>
struct Registry : Objects {
  int64_t add(std::shared_ptr<Value> value) { return Objects::add(std::move(value)); }
  std::shared_ptr<Value> get(int64_t number) { return std::static_pointer_cast<Value>(Objects::get(number)); }
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
                const std::optional<Tensor>& items, std::vector<Tensor> indices, std::vector<Tensor> tables) {
  inflight::begin_step(*steps.get(step), block_size, query_lens, kv_lens, items, indices, tables);
}

int64_t new_call(int64_t step, Sizes sizes, double scale, double softcap, int64_t group, const Tensor& stored,
                 ScalarType dtype) {
  CHECK(sizes.size() == 8, "an attention call has 8 sizes, not ", sizes.size());
  for (const int64_t size : sizes) CHECK(size <= 1 << 24, "a size of ", size, " is too large");
  const inflight::Shape shape{int(sizes[0]), int(sizes[1]), int(sizes[2]), int(sizes[3]), float(scale),
                              sizes[4],      sizes[5],      float(softcap), int(sizes[6]), sizes[7] != 0};
  const auto call = std::make_shared<Call>(Call{shape, int(group), stored, dtype, steps.get(step)});
  inflight::check(*call);
  return calls.add(call);
}
void delete_call(int64_t call) { calls.remove(call); }
void see_items(int64_t call) { calls.get(call)->shape.sees_items = true; }

void write(const Tensor& key, const Tensor& value, int64_t call) { inflight::write(*calls.get(call), key, value); }

Tensor attend(const Tensor& query, const std::optional<Tensor>& sinks, int64_t call, int64_t) {
  return inflight::attend(*calls.get(call), query, sinks);
}

Registry<Current<PlacedRows>> placings;

int64_t new_placing() { return placings.add(std::make_shared<Current<PlacedRows>>()); }
void delete_placing(int64_t placing) { placings.remove(placing); }
void put_rows(int64_t placing, const Tensor& rows, const Tensor& places, bool adds) {
  inflight::put_rows(*placings.get(placing), {rows, places, adds});
}
void place_rows(const Tensor& states, int64_t placing) { inflight::place_rows(states, *placings.get(placing)); }

Registry<Current<MixerStep>> mixer_steps;
Registry<Mixer> mixers;

int64_t new_mixer_step() { return mixer_steps.add(std::make_shared<Current<MixerStep>>()); }
void delete_mixer_step(int64_t step) { mixer_steps.remove(step); }
void begin_mixing(int64_t step, const Tensor& spans) { inflight::begin_mixing(*mixer_steps.get(step), spans); }
int64_t new_mixer(int64_t step, const Tensor& states) {
  return mixers.add(std::make_shared<Mixer>(Mixer{states, mixer_steps.get(step)}));
}
void delete_mixer(int64_t mixer) { mixers.remove(mixer); }

Tensor convolve(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, std::string_view activation,
                int64_t mixer) {
  return inflight::convolve(*mixers.get(mixer), x, weight, bias, activation);
}

Tensor recur(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
             const std::optional<Tensor>& beta, const std::optional<Tensor>& skip, const std::optional<Tensor>& rates,
             bool is_delta, bool normalizes, double scale, ScalarType dtype, int64_t mixer) {
  const Recurrence given{query, key, value, decay, beta, skip, rates, is_delta, normalizes, float(scale)};
  return inflight::recur(*mixers.get(mixer), given, dtype);
}

int64_t new_linear(const Tensor& panels, const std::optional<Tensor>& bias, const std::optional<Tensor>& scales,
                   int64_t in_features, int64_t out_features, std::string_view activation, std::string_view variant) {
  return linears.add(std::make_shared<Linear>(panels, bias, scales, in_features, out_features,
                                              find_activation(activation, variant)));
}
int64_t new_grouped_linear(const Tensor& panels, Sizes layout, const std::optional<Tensor>& order,
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

void begin_adapted_step(int64_t step, Sizes numbers, Sizes of_tokens, Sizes of_logits) {
  AdaptedStep& own = *adapted_steps.get(step);
  for (const Sizes rows : {of_tokens, of_logits})
    for (const int64_t number : rows)
      CHECK(number >= -1 && number < int64_t(numbers.size()), "there is no adapter ", number);
  const auto with_copies = [](Sizes rows) {
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

int64_t new_adapter(int64_t num_places, Sizes places, Sizes first_outputs, Sizes num_outputs,
                    const std::vector<Tensor>& downs, const std::vector<Tensor>& ups) {
  CHECK(num_places >= 0 && num_places <= 1 << 24, "there cannot be ", num_places, " places");
  auto adapter = std::make_shared<Adapter>();
  adapter->places.resize(num_places);
  const size_t size = places.size();
  CHECK(first_outputs.size() == size && num_outputs.size() == size && downs.size() == size && ups.size() == size,
              "an adapter's matrices come with a place each");
  for (size_t i = 0; i < size; ++i) {
    CHECK(places[i] >= 0 && places[i] < num_places, "there is no place ", places[i]);
    adapter->places[places[i]].push_back({downs[i], ups[i], first_outputs[i], num_outputs[i]});
  }
  check(*adapter);
  return adapters.add(adapter);
}
void delete_adapter(int64_t adapter) { adapters.remove(adapter); }

Tensor adapted_rows(const Tensor& rows, const Tensor& ids, int64_t step, int64_t place) {
  return inflight::adapted_rows(rows, ids, {adapted_steps.get(step), place, false});
}

int64_t new_experts(Sizes ups, Sizes downs, std::string_view activation, std::string_view variant) {
  auto mixture = std::make_shared<Experts>(Experts{{}, find_activation(activation, variant)});
  CHECK(ups.size() == downs.size(), "every expert has two projections");
  for (size_t i = 0; i < ups.size(); ++i) {
    const Expert& expert = mixture->experts.emplace_back(Expert{linears.get(ups[i]), linears.get(downs[i])});
    const bool is_gated = expert.up->out_features == 2 * expert.down->in_features;
    CHECK((is_gated || !mixture->activation) && expert.down->out_features == expert.up->in_features,
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

int64_t new_program(Sizes codes, std::span<const double> numbers, const std::vector<std::string>& words,
                    const std::vector<Tensor>& constants) {
  format::Program code;
  Reader(codes, numbers, words)(code);
  return programs.add(std::make_shared<Program>(std::move(code), constants, [](int64_t number) { return linears.get(number); }));
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

int64_t num_lanes() { return kLanes; }
int64_t scalar_type(ScalarType dtype) { return int64_t(dtype); }

// ------------------------------------------------------------------------------------------------ for the bridge

void check_kind(const InflightValue& value, ValueKind kind) {
  CHECK(value.kind == kind, "an operator takes an argument of the kind ", int64_t(kind), ", not ", value.kind);
}

// The objects of a kind.
template <class Item>
std::span<const Item> items_of(const InflightValue& value, ValueKind kind) {
  check_kind(value, kind);
  return {static_cast<const Item*>(value.items), size_t(value.integer)};
}

// An argument as a parameter of a type.
template <class Type>
[[gnu::noinline]] Type argument(const InflightValue& value) {
  if constexpr (std::is_same_v<Type, Tensor>) return Tensor(items_of<InflightTensor>(value, kValueKindTensor)[0]);
  else if constexpr (std::is_same_v<Type, std::optional<Tensor>>)
    return value.kind == kValueKindNone ? std::nullopt : std::optional(argument<Tensor>(value));
  else if constexpr (std::is_same_v<Type, std::string_view>) {
    const auto letters = items_of<char>(value, kValueKindWord);
    return {letters.data(), letters.size()};
  } else if constexpr (std::is_same_v<Type, Sizes>) return items_of<int64_t>(value, kValueKindIntegers);
  else if constexpr (std::is_same_v<Type, std::span<const double>>) return items_of<double>(value, kValueKindNumbers);
  else if constexpr (std::is_same_v<Type, std::vector<Tensor>>) {
    std::vector<Tensor> list;
    for (const InflightTensor& each : items_of<InflightTensor>(value, kValueKindTensors)) list.emplace_back(each);
    return list;
  } else if constexpr (std::is_same_v<Type, std::vector<std::string>>) {
    std::vector<std::string> list;
    for (const InflightValue& each : items_of<InflightValue>(value, kValueKindWords))
      list.emplace_back(argument<std::string_view>(each));
    return list;
  } else if constexpr (std::is_same_v<Type, double>) {
    check_kind(value, kValueKindNumber);
    return value.number;
  } else {
    if (value.kind != kValueKindFlag) check_kind(value, kValueKindInteger);
    return Type(value.integer);
  }
}

// References returned to the caller.
[[gnu::noinline]] InflightValue given(const std::vector<Tensor>& tensors) {
  thread_local std::vector<InflightTensor> own;
  own.clear();
  for (const Tensor& each : tensors) {
    own.push_back(each.raw());
    torch->retain(each.memory().raw().owner);
  }
  return {kValueKindTensors, int64_t(own.size()), 0, own.data()};
}
InflightValue given(const Tensor& tensor) { return given(std::vector{tensor}); }
InflightValue given(int64_t number) { return {kValueKindInteger, number, 0, nullptr}; }

template <class Result, class... Parameters, size_t... kPlaces>
void call(Result (*function)(Parameters...), const InflightValue* arguments, InflightValue* result,
          std::index_sequence<kPlaces...>) {
  const auto run = [&] { return function(argument<std::remove_cvref_t<Parameters>>(arguments[kPlaces])...); };
  if constexpr (std::is_void_v<Result>) run();
  else *result = given(run());
}

template <class Result, class... Parameters>
void call(Result (*function)(Parameters...), const InflightValue* arguments, InflightValue* result) {
  call(function, arguments, result, std::index_sequence_for<Parameters...>());
}

template <auto kFunction>
void run(const InflightValue* arguments, InflightValue* result) {
  call(kFunction, arguments, result);
}

template <class Result, class... Parameters>
constexpr int32_t count_parameters(Result (*)(Parameters...)) {
  return int32_t(sizeof...(Parameters));
}

template <auto kFunction>
constexpr InflightOperator on_cpu(const char* schema) {
  return {schema, true, count_parameters(kFunction), run<kFunction>};
}
template <auto kFunction>
constexpr InflightOperator anywhere(const char* schema) {
  return {schema, false, count_parameters(kFunction), run<kFunction>};
}

const InflightOperator operators[] = {
    anywhere<num_lanes>("num_lanes() -> int"),
    anywhere<new_step>("new_step() -> int"),
    anywhere<delete_step>("delete_step(int step) -> ()"),
    anywhere<begin_step>("begin_step(int step, int block_size, Tensor query_lens, Tensor kv_lens, Tensor? items, "
                         "Tensor[] indices, Tensor[] tables) -> ()"),
    anywhere<new_call>("new_call(int step, int[] sizes, float scale, float softcap, int group, Tensor stored, "
                       "ScalarType dtype) -> int"),
    anywhere<delete_call>("delete_call(int call) -> ()"),
    anywhere<see_items>("see_items(int call) -> ()"),
    on_cpu<write>("write(Tensor key, Tensor value, int call) -> ()"),
    on_cpu<attend>("attend(Tensor query, Tensor? sinks, int call, int value_head_size) -> Tensor"),
    anywhere<new_placing>("new_placing() -> int"),
    anywhere<delete_placing>("delete_placing(int placing) -> ()"),
    anywhere<put_rows>("put_rows(int placing, Tensor rows, Tensor places, bool adds) -> ()"),
    on_cpu<place_rows>("place_rows(Tensor(a!) states, int placing) -> ()"),
    anywhere<new_mixer_step>("new_mixer_step() -> int"),
    anywhere<delete_mixer_step>("delete_mixer_step(int step) -> ()"),
    anywhere<begin_mixing>("begin_mixing(int step, Tensor spans) -> ()"),
    anywhere<new_mixer>("new_mixer(int step, Tensor states) -> int"),
    anywhere<delete_mixer>("delete_mixer(int mixer) -> ()"),
    on_cpu<convolve>("convolve(Tensor x, Tensor weight, Tensor? bias, str activation, int mixer) -> Tensor"),
    on_cpu<recur>("recur(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor? skip, Tensor? "
                  "rates, bool is_delta, bool normalizes, float scale, ScalarType dtype, int mixer) -> Tensor"),
    anywhere<inflight::has_panels>("has_panels(ScalarType dtype) -> bool"),
    anywhere<new_linear>("new_linear(Tensor panels, Tensor? bias, Tensor? scales, int in_features, int out_features, "
                         "str activation, str variant) -> int"),
    anywhere<inflight::supports_int8_activations>("supports_int8_activations() -> bool"),
    anywhere<inflight::prefers_int8_activations>("prefers_int8_activations() -> bool"),
    anywhere<inflight::pack_grouped>("pack_grouped(int[] layout, Tensor numbers, Tensor coarse, Tensor? fine, "
                                     "Tensor? coarse_minima, Tensor? fine_minima) -> Tensor"),
    anywhere<inflight::pack_panels>("pack_panels(Tensor weight, Tensor panels) -> ()"),
    anywhere<inflight::pack_blocks>("pack_blocks(str kind, int[] layout, Tensor[] blocks, Tensor rows) -> Tensor"),
    anywhere<inflight::round_grouped>("round_grouped(int[] layout, Tensor weight) -> Tensor"),
    on_cpu<inflight::grouped_rows>("grouped_rows(int[] layout, Tensor panels, Tensor rows, int out_features, int "
                                   "in_features, ScalarType dtype) -> Tensor"),
    anywhere<inflight::grouped_values>("grouped_values(int[] layout, Tensor panels, int out_features, int "
                                       "in_features, ScalarType dtype) -> Tensor"),
    anywhere<new_grouped_linear>("new_grouped_linear(Tensor panels, int[] layout, Tensor? order, bool is_exact, "
                                 "Tensor? bias, int in_features, int out_features, str activation, str variant) -> "
                                 "int"),
    anywhere<delete_linear>("delete_linear(int linear) -> ()"),
    on_cpu<linear>("linear(Tensor x, int linear, int out_features) -> Tensor"),
    anywhere<new_adapted_step>("new_adapted_step() -> int"),
    anywhere<delete_adapted_step>("delete_adapted_step(int step) -> ()"),
    anywhere<begin_adapted_step>("begin_adapted_step(int step, int[] adapters, int[] of_tokens, int[] of_logits) -> "
                                 "()"),
    anywhere<adapt_linear>("adapt_linear(int linear, int step, int place, bool reads_logit_rows) -> ()"),
    anywhere<new_adapter>("new_adapter(int num_places, int[] places, int[] first_outputs, int[] num_outputs, "
                          "Tensor[] downs, Tensor[] ups) -> int"),
    anywhere<delete_adapter>("delete_adapter(int adapter) -> ()"),
    on_cpu<adapted_rows>("adapted_rows(Tensor rows, Tensor ids, int step, int place) -> Tensor"),
    anywhere<new_experts>("new_experts(int[] ups, int[] downs, str activation, str variant) -> int"),
    anywhere<delete_experts>("delete_experts(int experts) -> ()"),
    on_cpu<experts>("experts(Tensor x, Tensor chosen, int experts) -> Tensor"),
    on_cpu<experts_up>("experts_up(Tensor x, Tensor chosen, int experts, int out_features) -> Tensor"),
    on_cpu<experts_down>("experts_down(Tensor rows, Tensor chosen, int experts, int out_features) -> Tensor"),
    on_cpu<inflight::weighted_sum>("weighted_sum(Tensor rows, Tensor weights) -> Tensor"),
    anywhere<new_exchange>("new_exchange(int file, int rank, int num_ranks, int place_bytes) -> int"),
    anywhere<delete_exchange>("delete_exchange(int exchange) -> ()"),
    anywhere<begin_exchange>("begin_exchange(int exchange, int step) -> ()"),
    anywhere<give_up_exchange>("give_up_exchange(int exchange) -> ()"),
    anywhere<is_exchange_given_up>("is_exchange_given_up(int exchange) -> bool"),
    anywhere<end_exchange>("end_exchange(int exchange) -> ()"),
    on_cpu<sum_of_ranks>("sum_of_ranks(Tensor rows, int exchange) -> Tensor"),
    on_cpu<gather_of_ranks>("gather_of_ranks(Tensor rows, int exchange, int num_ranks) -> Tensor"),
    on_cpu<inflight::activate>("activate(Tensor x, str activation, str variant) -> Tensor"),
    anywhere<scalar_type>("scalar_type(ScalarType dtype) -> int"),
    anywhere<new_program>("new_program(int[] codes, float[] numbers, str[] words, Tensor[] constants) -> int"),
    anywhere<delete_program>("delete_program(int program) -> ()"),
    anywhere<run_program>("run_program(Tensor input_ids, Tensor positions, Tensor logit_rows, int program) -> "
                          "Tensor[]"),
    anywhere<new_program_run>("new_program_run(Tensor input_ids, Tensor positions, Tensor logit_rows, int program) "
                              "-> int"),
    anywhere<delete_program_run>("delete_program_run(int run) -> ()"),
    anywhere<advance_program_run>("advance_program_run(int run, int num_items) -> bool"),
    anywhere<outputs_of_program_run>("outputs_of_program_run(int run) -> Tensor[]"),
    anywhere<inflight::use_own_threads>("use_own_threads(int number) -> ()"),
    anywhere<inflight::greedy>("greedy(Tensor logits) -> Tensor"),
    anywhere<inflight::sample>("sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
                               "Tensor uniform) -> Tensor"),
};

const char* run_operator(const InflightOperator* own, const InflightValue* arguments, InflightValue* result) {
  thread_local std::string message;
  try {
    own->run(arguments, result);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

const InflightKernels kernels = {operators, std::size(operators), run_operator};

}  // namespace
}  // namespace inflight::operators

namespace inflight {

const InflightOperator* find_operator(std::string_view name) {
  for (const InflightOperator& each : operators::operators)
    if (const std::string_view schema = each.schema; schema.substr(0, schema.find('(')) == name) return &each;
  return nullptr;
}

}  // namespace inflight

extern "C" __attribute__((visibility("default"))) const InflightKernels* inflight_kernels(const InflightTorch* torch) {
  inflight::torch = torch;
  return &inflight::operators::kernels;
}
