#include "program.h"

#include <cstring>

#include "checks.h"
#include "parallel.h"
#include "read_ahead.h"
#include "threads.h"

namespace inflight {
namespace {

constexpr int64_t kMaxValues = 1 << 20;
constexpr int64_t kMaxTokensReadingAhead = 8;  // of a memory-bound step
constexpr int64_t kMinNormalized = 1 << 14;    // elements of a layer norm that are worth another thread

using format::Argument;
using format::Size;
using format::View;

// The constant part of an argument. It points into it.
InflightValue known(const Argument& argument) {
  switch (argument.kind) {
    case kValueKindInteger:
    case kValueKindFlag:
    case kValueKindIntegerAsTensor: return {argument.kind, argument.sizes.at(0).fixed, 0, nullptr};
    case kValueKindNumber:
    case kValueKindNumberAsTensor: return {argument.kind, 0, argument.numbers.at(0), nullptr};
    case kValueKindWord:
    case kValueKindDevice: return {argument.kind, int64_t(argument.word.size()), 0, argument.word.data()};
    case kValueKindNumbers: return {argument.kind, int64_t(argument.numbers.size()), 0, argument.numbers.data()};
    default: return {argument.kind, 0, 0, nullptr};
  }
}

void check(const Argument& argument) {
  const auto& [kind, sizes, numbers, views, word] = argument;
  CHECK(kValueKindNone <= kind && kind <= kValueKindNumbers, "a program has an argument of no known kind");
  CHECK(kind != kValueKindTensor || (views.size() == 1 && views[0]), "a program has an argument without its tensor");
  known(argument);
}

// An operator's results.
std::vector<Memory> memories_of(const InflightValue& result) {
  const auto* tensors = static_cast<const InflightTensor*>(result.items);
  std::vector<Memory> memories;
  for (int64_t i = 0; tensors && i < result.integer; ++i) memories.push_back(Memory::taken(tensors[i].memory));
  return memories;
}

}  // namespace

Tensor view_of(const View& view, const std::vector<Memory>& values, const StepSize& step) {
  const auto& [value, dtype, sizes, strides, offset, is_opaque] = view;
  const Memory& base = values.at(value);
  CHECK(base.defined(), "a program reads a value that is not there");
  Memory memory = base;
  if (is_opaque) {
    memory.add_flags(kInflightIsWhole);
    return {std::move(memory), Sizes()};
  }
  CHECK(sizes.size() == strides.size() && int64_t(sizes.size()) <= kMaxDims, "a view has a stride for each of its sizes, ",
        kMaxDims, " at most");
  CHECK(base.is_dense(), "a program looks into a value that is not dense");
  memory.set_type(dtype);
  int64_t shape[kMaxDims], distances[kMaxDims];
  __int128 num_elements = 1;
  const int64_t first = place_at(offset, step), num_dims = int64_t(sizes.size()), item_size = size_of(dtype);
  __int128 end = first + 1;
  bool is_empty = false;
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    shape[dim] = place_at(sizes[dim], step), distances[dim] = place_at(strides[dim], step);
    end += __int128(shape[dim] - 1) * distances[dim];
    is_empty |= shape[dim] == 0;
    num_elements *= shape[dim];
    CHECK(num_elements < kMaxPlace, "a program asks for too much memory");
  }
  CHECK(is_empty || end * item_size <= base.num_bytes(), "a view would leave its memory");
  char* data = base.begin() + first * item_size;
  return {std::move(memory), data, Sizes(shape, num_dims), Sizes(distances, num_dims)};
}

OperatorCall::OperatorCall(format::OperatorCall code) : code_(std::move(code)) {
  const std::string& name = code_.name;
  for (const Argument& each : code_.arguments) check(each);
  if (name.starts_with("inflight::")) own_ = find_operator(std::string_view(name).substr(10));
  if (own_) {
    CHECK(int64_t(code_.arguments.size()) == own_->num_arguments, "an operator of a program has ", own_->num_arguments,
          " arguments, not ", code_.arguments.size());
  } else {
    std::vector<InflightArgument> arguments;
    for (const Argument& each : code_.arguments) {
      const bool is_fixed = !each.sizes.empty() && each.sizes[0].per_token == 0 && each.sizes[0].per_logit_row == 0;
      arguments.push_back({known(each), is_fixed});
    }
    void* made = nullptr;
    check_done(torch->new_operator(name.c_str(), code_.overload.c_str(), arguments.data(), int64_t(arguments.size()), &made));
    operator_.reset(made);
  }
  is_torchs_ = name.starts_with("aten::");
  is_layer_norm_ = name == "aten::native_layer_norm" || name == "aten::layer_norm";
}

void OperatorCall::run(std::vector<Memory>& values, const StepSize& step, ReusedMemory&) const {
  std::vector<Tensor> viewed;  // they hold their memory until the end
  std::vector<InflightTensor> tensors;
  std::vector<int64_t> integers;
  size_t num_tensors = 0, num_integers = 0;
  for (const Argument& each : code_.arguments) num_tensors += each.views.size(), num_integers += each.sizes.size();
  viewed.reserve(num_tensors), tensors.reserve(num_tensors), integers.reserve(num_integers);
  std::vector<InflightValue> arguments;
  for (const Argument& each : code_.arguments) {
    InflightValue& argument = arguments.emplace_back(known(each));
    if (each.kind == kValueKindTensor || each.kind == kValueKindTensors) {
      argument = {each.kind, int64_t(each.views.size()), 0, tensors.data() + tensors.size()};
      for (const auto& view : each.views)
        tensors.push_back(view ? viewed.emplace_back(view_of(*view, values, step)).raw() : InflightTensor{});
    } else if (each.kind == kValueKindInteger) {
      argument.integer = at(each.sizes[0], step);
    } else if (each.kind == kValueKindIntegers) {
      argument = {each.kind, int64_t(each.sizes.size()), 0, integers.data() + integers.size()};
      for (const Size& size : each.sizes) integers.push_back(at(size, step));
    }
  }
  const bool is_alone = is_torchs_ && uses_own_threads();
  std::vector<Memory> results = own_                                 ? call_own(arguments)
                                : is_alone && is_dealt_out(arguments) ? deal_out(std::move(arguments))
                                                                      : call(arguments, is_alone ? kInflightAlone : 0);
  for (size_t i = 0; i < results.size(); ++i) values.at(code_.outputs.at(i)) = std::move(results[i]);
}

std::vector<Memory> OperatorCall::call(const std::vector<InflightValue>& arguments, int32_t how) const {
  InflightValue result;
  check_done(torch->call_operator(operator_.get(), arguments.data(), how, &result));
  return memories_of(result);
}

// Without torch's dispatcher.
std::vector<Memory> OperatorCall::call_own(const std::vector<InflightValue>& arguments) const {
  const Range range(code_.name.c_str());
  InflightValue result{};
  own_->run(arguments.data(), &result);
  return memories_of(result);
}

// Whether this is a layer norm of the last dimension with work for several threads.
bool OperatorCall::is_dealt_out(const std::vector<InflightValue>& arguments) const {
  if (!is_layer_norm_ || code_.arguments.at(0).kind != kValueKindTensor || code_.arguments.at(1).kind != kValueKindIntegers) return false;
  const auto& input = *static_cast<const InflightTensor*>(arguments[0].items);
  int64_t num_elements = 1;
  for (int64_t dim = 0; dim < input.num_dims; ++dim) num_elements *= input.sizes[dim];
  return !(input.memory.flags & kInflightIsWhole) && input.num_dims > 0 && thread_count() > 1 &&
         num_elements >= 2 * kMinNormalized && arguments[1].integer == 1 &&
         *static_cast<const int64_t*>(arguments[1].items) == input.sizes[input.num_dims - 1];
}

// Torch's layer norm would run on this thread alone. Rows are independent, so our threads share them.
std::vector<Memory> OperatorCall::deal_out(std::vector<InflightValue> arguments) const {
  const Tensor input = Tensor(*static_cast<const InflightTensor*>(arguments[0].items)).contiguous();
  const int64_t size = input.size(-1), num_rows = input.numel() / size;
  const int64_t num_ranges = std::min(kRangesOfThread * thread_count(), input.numel() / kMinNormalized);
  const int64_t row_sizes[] = {num_rows, size};
  const Tensor rows(input.memory(), static_cast<char*>(input.data_ptr()), row_sizes, std::array{size, int64_t(1)});
  std::vector<Memory> results = {empty(row_sizes, input.scalar_type()).memory()};
  const int64_t row_bytes = size * input.element_size();
  std::vector<std::vector<Memory>> parts(num_ranges);
  for_each_item(num_ranges, [&](int64_t i) {
    const int64_t begin = num_rows * i / num_ranges, end = num_rows * (i + 1) / num_ranges;
    const InflightTensor part = rows.narrow(begin, end - begin).raw();
    std::vector<InflightValue> own = arguments;
    own[0].items = &part;
    parts[i] = call(own, kInflightAlone | kInflightInferring);
    std::memcpy(results[0].begin() + begin * row_bytes, parts[i].at(0).begin(), (end - begin) * row_bytes);
    parts[i][0].reset();
  });
  for (size_t result = 1; result < parts[0].size(); ++result) {  // means and deviations, which some overloads give, too
    results.push_back(empty({num_rows}, parts[0][result].scalar_type()).memory());
    char* to = results.back().begin();
    for (const auto& part : parts) to = std::copy_n(part[result].begin(), part[result].num_bytes(), to);
  }
  return results;
}

void LinearCall::run(std::vector<Memory>& values, const StepSize& step, ReusedMemory& memory) const {
  const Range range("inflight::linear");
  const Tensor rows = view_of(input, values, step);
  CHECK(rows.dim() > 0, "activations must have a dimension");
  int64_t sizes[kMaxDims];
  std::copy_n(rows.sizes().data(), rows.dim(), sizes);
  sizes[rows.dim() - 1] = linear->out_features;
  __int128 num_elements = 1;
  for (int64_t dim = 0; dim < rows.dim(); ++dim) num_elements *= sizes[dim];
  CHECK(num_elements < kMaxPlace, "a program asks for too much memory");
  Tensor to(memory.take(int64_t(num_elements), rows.scalar_type()), Sizes(sizes, rows.dim()));
  values.at(output) = to.memory();
  apply_to(*linear, rows, to);
}

Program::Program(format::Program code, const std::vector<Tensor>& constants, const FindLinear& find_linear)
    : outputs_(std::move(code.outputs)) {
  const int64_t num_values = code.num_values;
  CHECK(num_values >= kNumInputs && num_values < kMaxValues, "a program cannot have ", num_values, " values");
  values_.resize(num_values);
  for (size_t i = 0; i < code.constants.size(); ++i) {
    const Tensor& constant = constants.at(i);
    CHECK(constant.defined() && constant.memory().is_on_cpu(), "a constant of a program must lie on the CPU");
    values_.at(code.constants[i]) = constant.memory();
  }
  struct {
    const FindLinear& find_linear;
    decltype(Item::work) operator()(format::OperatorCall& call) const { return OperatorCall(std::move(call)); }
    decltype(Item::work) operator()(format::RowKernel& kernel) const { return RowKernel(std::move(kernel)); }
    decltype(Item::work) operator()(format::LinearCall& call) const {
      return LinearCall{find_linear(call.linear), std::move(call.input), call.output};
    }
  } const ready{find_linear};
  for (format::Item& item : code.items) items_.push_back({std::visit(ready, item.work), std::move(item.released)});
  const Linear* next_linear = nullptr;
  for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
    if (const auto* call = std::get_if<LinearCall>(&item->work)) next_linear = call->linear.get();
    if (std::holds_alternative<RowKernel>(item->work)) item->next_linear = next_linear;
  }
  is_reused_.resize(num_values);
  for (const Item& item : items_)
    for (const int64_t value : std::visit([](const auto& work) { return work.made(); }, item.work))
      is_reused_.at(value) = true;
}

ProgramRun::ProgramRun(std::shared_ptr<const Program> program, const Tensor& input_ids, const Tensor& positions,
                       const Tensor& logit_rows)
    : program_(std::move(program)), values_(program_->values_) {
  const Tensor* inputs[kNumInputs] = {&input_ids, &positions, &logit_rows};
  for (int64_t i = 0; i < kNumInputs; ++i) {
    check_whole(*inputs[i], "a program's input", 1, kLong);
    values_.at(i) = inputs[i]->memory();
  }
  step_ = {input_ids.size(0), logit_rows.size(0)};
  CHECK(step_.tokens == 0 || positions.size(0) % step_.tokens == 0, "there are ", positions.size(0), " positions of ",
        step_.tokens, " tokens");
  const std::lock_guard lock(program_->mutex_);
  std::swap(memory_, program_->memory_);
}

ProgramRun::~ProgramRun() {
  const std::lock_guard lock(program_->mutex_);
  std::swap(memory_, program_->memory_);
}

void ProgramRun::run(const Program::Item& item) {
  std::visit([&](const auto& work) { work.run(values_, step_, memory_); }, item.work);
  for (const int64_t value : item.released) {
    if (program_->is_reused_.at(value) && values_[value].defined()) memory_.take_back(std::move(values_[value]));
    else values_[value].reset();
  }
}

bool ProgramRun::advance(int64_t num_items) {
  const auto& items = program_->items_;
  while (num_items > 0 && next_ < items.size()) {
    const Program::Item& first = items[next_];
    const int64_t count = std::max<int64_t>(1, num_small_items(num_items));
    const auto run_items = [&] {
      for (const size_t end = next_ + count; next_ < end; ++next_) run(items[next_]);
    };
    if (step_.tokens <= kMaxTokensReadingAhead && first.next_linear) {
      const Tensor& weights = first.next_linear->panels;
      run_reading_ahead(static_cast<const char*>(weights.const_data_ptr()), int64_t(weights.nbytes()), run_items);
    } else {
      run_items();
    }
    num_items -= count;
  }
  return next_ < items.size();
}

// The number of consecutive row kernels from here.
int64_t ProgramRun::num_small_items(int64_t most) const {
  const auto& items = program_->items_;
  int64_t count = 0;
  while (count < most && next_ + count < items.size() && std::holds_alternative<RowKernel>(items[next_ + count].work))
    ++count;
  return count;
}

std::vector<Tensor> ProgramRun::outputs() const {
  CHECK(next_ == program_->items_.size(), "a program has not run to its end");
  std::vector<Tensor> outputs;
  for (const View& view : program_->outputs_) {
    InflightTensor own;
    const InflightTensor raw = view_of(view, values_, step_).raw();
    check_done(torch->view(&raw, &own));
    outputs.emplace_back(Memory::taken(own.memory), own);
  }
  return outputs;
}

}  // namespace inflight
