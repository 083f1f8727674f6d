#include "program.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <ATen/record_function.h>

#include <cstring>

#include "checks.h"
#include "parallel.h"
#include "read_ahead.h"
#include "threads.h"
#include "torch_alone.h"

namespace inflight {
namespace {

constexpr int64_t kNumInputs = 3, kMaxValues = 1 << 20;
constexpr int64_t kMaxTokensReadingAhead = 8;  // of a step that memory bounds
constexpr int64_t kMinNormalized = 1 << 14;    // elements of a layer norm that are worth another thread

enum class Work : int64_t { kRowKernel, kOperator, kLinear };

enum class Kind : int64_t { kNone, kInteger, kNumber, kFlag, kTensor, kIntegers, kTensors, kNumberAsTensor,
                            kIntegerAsTensor, kWord, kDevice, kNumbers };

at::DimVector at_step(const std::vector<Size>& sizes, const StepSize& step) {
  at::DimVector numbers;
  for (const Size& size : sizes) numbers.push_back(size.at(step));
  return numbers;
}

at::DimVector places_at(const std::vector<Size>& sizes, const StepSize& step) {
  at::DimVector places;
  for (const Size& size : sizes) places.push_back(size.place_at(step));
  return places;
}

ValueView read_view(Reader& reader) {
  const int64_t value = reader.code();
  const bool is_opaque = reader.flag();
  const at::ScalarType dtype = reader.dtype();
  std::vector<Size> sizes = reader.sizes(), strides = reader.sizes();
  return {value, is_opaque, dtype, std::move(sizes), std::move(strides), reader.size()};
}

// A number that takes part in type promotion as Python's do.
at::Tensor wrapped(const at::Scalar& number) {
  at::Tensor tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// Torch's layer norm, which would run on this thread alone. No row knows of another, so ours deal them out.
void call_layer_norm(const c10::OperatorHandle& layer_norm, torch::jit::Stack& stack) {
  const at::Tensor input = stack.at(0).toTensor();
  const int64_t size = input.dim() > 0 ? input.size(-1) : 0, num_threads = at::get_num_threads();
  const int64_t num_ranges = std::min(kRangesOfThread * num_threads, input.numel() / kMinNormalized);
  if (num_ranges < 2 || num_threads < 2 || stack.at(1).toIntVector() != std::vector<int64_t>{size}) {
    const TorchAlone alone;
    return layer_norm.callBoxed(&stack);
  }
  const at::Tensor rows = input.reshape({-1, size}).contiguous();
  at::Tensor output = at::empty(input.sizes(), input.options());
  const int64_t row_bytes = size * input.element_size();
  std::vector<torch::jit::Stack> parts(num_ranges, stack);
  for_each_item(num_ranges, [&](int64_t i) {
    const c10::InferenceMode is_inferring;  // which only the calling thread may be in
    const TorchAlone alone;
    const int64_t begin = rows.size(0) * i / num_ranges, end = rows.size(0) * (i + 1) / num_ranges;
    parts[i][0] = rows.narrow(0, begin, end - begin);
    layer_norm.callBoxed(&parts[i]);
    std::memcpy(static_cast<char*>(output.data_ptr()) + begin * row_bytes, parts[i][0].toTensor().const_data_ptr(),
                (end - begin) * row_bytes);
  });
  at::DimVector sizes(input.sizes());  // of means and deviations, which some overloads give, too
  sizes.back() = 1;
  stack = {output};
  for (size_t result = 1; result < parts[0].size(); ++result) {
    std::vector<at::Tensor> tensors;
    for (const auto& part : parts) tensors.push_back(part[result].toTensor());
    stack.emplace_back(at::cat(tensors).reshape(sizes));
  }
}

}  // namespace

at::Tensor ValueView::of(const std::vector<at::Tensor>& values, const StepSize& step) const {
  const at::Tensor& base = values.at(value);
  TORCH_CHECK(base.defined(), "a program reads a value that is not there");
  if (is_opaque) return base;
  TORCH_CHECK(sizes.size() == strides.size(), "a view has a stride for each of its sizes");
  const at::DimVector shape = places_at(sizes, step), distances = places_at(strides, step);
  const int64_t first = offset.place_at(step);
  __int128 end = first + 1;
  for (size_t dim = 0; dim < shape.size(); ++dim) end += __int128(shape[dim] - 1) * distances[dim];
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  TORCH_CHECK(is_empty || end * int64_t(c10::elementSize(dtype)) <= int64_t(base.storage().nbytes()),
              "a view would leave its memory");
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                             base.key_set(), c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape, distances, first);
  return view;
}

OperatorCall::OperatorCall(Reader& reader)
    : operator_([&] {
        const std::string& name = reader.word();
        return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), reader.word().c_str());
      }()) {
  const auto& schema = operator_.schema().arguments();
  size_t next = 0;
  arguments_ = reader.list([&] {
    Argument argument = read_argument(reader, schema.at(next).type());
    check_enumerator(schema.at(next++).real_type(), argument);
    return argument;
  });
  TORCH_CHECK(arguments_.size() == schema.size(), "an operator of a program has ", schema.size(), " arguments, not ",
              arguments_.size());
  outputs_ = reader.list([&] { return reader.code(); });
  const std::string& name = operator_.schema().name();
  is_torchs_ = name.starts_with("aten::");
  is_layer_norm_ = name == "aten::native_layer_norm" || name == "aten::layer_norm";
}

OperatorCall::Argument OperatorCall::read_argument(Reader& reader, const c10::TypePtr& type) const {
  const auto as_whole = [](c10::IValue value) { return Argument(std::move(value)); };
  switch (Kind(reader.code())) {
    case Kind::kNone: return as_whole({});
    case Kind::kInteger: return reader.size();
    case Kind::kNumber: return as_whole(reader.number());
    case Kind::kFlag: return as_whole(reader.flag());
    case Kind::kTensor: return read_view(reader);
    case Kind::kIntegers: return reader.sizes();
    case Kind::kTensors:
      return ViewList{reader.list([&] { return reader.flag() ? std::optional(read_view(reader)) : std::nullopt; }),
                      !type->isSubtypeOf(*c10::ListType::ofTensors())};
    case Kind::kNumberAsTensor: return as_whole(wrapped(reader.number()));
    case Kind::kIntegerAsTensor: return as_whole(wrapped(reader.code()));
    case Kind::kWord: return as_whole(reader.word());
    case Kind::kDevice: return as_whole(c10::Device(reader.word()));
    case Kind::kNumbers: return as_whole(c10::List<double>(reader.list([&] { return reader.number(); })));
  }
  TORCH_CHECK(false, "a program has an argument of no known kind");
}

// Torch does not ask whether there is a dtype, a layout or a memory format of a number.
void OperatorCall::check_enumerator(c10::TypePtr type, const Argument& argument) {
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  const auto kind = type->kind();
  if (kind != c10::TypeKind::ScalarTypeType && kind != c10::TypeKind::LayoutType &&
      kind != c10::TypeKind::MemoryFormatType)
    return;
  if (const auto* none = std::get_if<c10::IValue>(&argument); none && none->isNone()) return;
  const auto* number = std::get_if<Size>(&argument);
  TORCH_CHECK(number && number->per_token == 0 && number->per_logit_row == 0, "an operator takes no such enumerator");
  if (kind == c10::TypeKind::ScalarTypeType) return void(as_dtype(number->fixed));
  const int64_t last = kind == c10::TypeKind::LayoutType ? 0 : int64_t(at::MemoryFormat::ChannelsLast);
  TORCH_CHECK(number->fixed >= 0 && number->fixed <= last, "an operator takes no such enumerator");
}

c10::IValue OperatorCall::value_of(const Argument& argument, const std::vector<at::Tensor>& values,
                                  const StepSize& step) const {
  if (const auto* whole = std::get_if<c10::IValue>(&argument)) return *whole;
  if (const auto* size = std::get_if<Size>(&argument)) return size->at(step);
  if (const auto* view = std::get_if<ValueView>(&argument)) return view->of(values, step);
  if (const auto* sizes = std::get_if<std::vector<Size>>(&argument)) return at::IntArrayRef(at_step(*sizes, step));
  const auto& [views, are_optional] = std::get<ViewList>(argument);
  if (!are_optional) {
    c10::List<at::Tensor> tensors;
    for (const auto& view : views) tensors.push_back(view.value().of(values, step));
    return tensors;
  }
  c10::List<std::optional<at::Tensor>> tensors;
  for (const auto& view : views) tensors.push_back(view ? std::optional(view->of(values, step)) : std::nullopt);
  return tensors;
}

void OperatorCall::run(std::vector<at::Tensor>& values, const StepSize& step, ReusedMemory&) const {
  torch::jit::Stack stack;
  stack.reserve(arguments_.size());
  for (const Argument& argument : arguments_) stack.push_back(value_of(argument, values, step));
  if (is_layer_norm_ && uses_own_threads()) {
    call_layer_norm(operator_, stack);
  } else {
    const auto alone = is_torchs_ && uses_own_threads() ? std::make_optional<TorchAlone>() : std::nullopt;
    operator_.callBoxed(&stack);
  }
  size_t next = 0;
  const auto keep = [&](const at::Tensor& result) { values.at(outputs_.at(next++)) = result; };
  for (const c10::IValue& result : stack) {
    if (result.isTensor()) keep(result.toTensor());
    if (result.isTensorList())
      for (const at::Tensor& each : result.toTensorList()) keep(each);
  }
}

void LinearCall::run(std::vector<at::Tensor>& values, const StepSize& step, ReusedMemory& memory) const {
  RECORD_FUNCTION("inflight::linear", c10::ArrayRef<const c10::IValue>{});
  const at::Tensor rows = input.of(values, step);
  TORCH_CHECK(rows.dim() > 0, "activations must have a dimension");
  at::DimVector sizes(rows.sizes());
  sizes.back() = linear->out_features;
  at::Tensor& to = values.at(output);
  to = memory.empty(sizes, rows.scalar_type());
  apply_to(*linear, rows, to);
}

Program::Program(Reader& reader, const std::vector<at::Tensor>& constants, const FindLinear& find_linear) {
  const int64_t num_values = reader.code();
  TORCH_CHECK(num_values >= kNumInputs && num_values < kMaxValues, "a program cannot have ", num_values, " values");
  values_.resize(num_values);
  size_t next = 0;
  reader.list([&] {
    const at::Tensor& constant = constants.at(next++);
    TORCH_CHECK(constant.defined() && constant.device().is_cpu(), "a constant of a program must lie on the CPU");
    return values_.at(reader.code()) = constant;
  });
  items_ = reader.list([&] {
    const auto read_work = [&]() -> decltype(Item::work) {
      switch (Work(reader.code())) {
        case Work::kRowKernel: return RowKernel(reader);
        case Work::kOperator: return OperatorCall(reader);
        case Work::kLinear: {
          auto linear = find_linear(reader.code());
          ValueView input = read_view(reader);
          return LinearCall{std::move(linear), std::move(input), reader.code()};
        }
      }
      TORCH_CHECK(false, "a program has work of no known kind");
    };
    auto work = read_work();
    return Item{std::move(work), reader.list([&] { return reader.code(); })};
  });
  const Linear* next_linear = nullptr;
  for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
    if (const auto* call = std::get_if<LinearCall>(&item->work)) next_linear = call->linear.get();
    if (std::holds_alternative<RowKernel>(item->work)) item->next_linear = next_linear;
  }
  outputs_ = reader.list([&] { return read_view(reader); });
  is_reused_.resize(num_values);
  for (const Item& item : items_)
    for (const int64_t value : std::visit([](const auto& work) { return work.made(); }, item.work))
      is_reused_.at(value) = true;
}

ProgramRun::ProgramRun(std::shared_ptr<const Program> program, const at::Tensor& input_ids, const at::Tensor& positions,
                       const at::Tensor& logit_rows)
    : program_(std::move(program)), values_(program_->values_) {
  const at::Tensor* inputs[kNumInputs] = {&input_ids, &positions, &logit_rows};
  for (int64_t i = 0; i < kNumInputs; ++i) {
    check_whole(*inputs[i], "a program's input", 1, at::kLong);
    values_.at(i) = *inputs[i];
  }
  step_ = {input_ids.size(0), logit_rows.size(0)};
  check_size(positions, "positions", 0, step_.tokens);
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
      const at::Tensor& weights = first.next_linear->panels;
      run_reading_ahead(static_cast<const char*>(weights.const_data_ptr()), int64_t(weights.nbytes()), run_items);
    } else {
      run_items();
    }
    num_items -= count;
  }
  return next_ < items.size();
}

// How many row kernels come next, one after the other.
int64_t ProgramRun::num_small_items(int64_t most) const {
  const auto& items = program_->items_;
  int64_t count = 0;
  while (count < most && next_ + count < items.size() && std::holds_alternative<RowKernel>(items[next_ + count].work))
    ++count;
  return count;
}

std::vector<at::Tensor> ProgramRun::outputs() const {
  TORCH_CHECK(next_ == program_->items_.size(), "a program has not run to its end");
  std::vector<at::Tensor> outputs;
  for (const ValueView& view : program_->outputs_) outputs.push_back(view.of(values_, step_));
  return outputs;
}

}  // namespace inflight
