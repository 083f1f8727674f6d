// The only code that depends on torch: registers our operators, and implements the kernels' imports (bridge.h). Built
// for a version of torch, and for any CPU.
#include "bridge.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <omp.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

// MKL's, if torch has it: it wakes torch's threads even for two hundred cosines.
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int number);

namespace inflight {
namespace {

using torch::jit::Stack;

static_assert(int(at::kByte) == 0 && int(at::kChar) == 1 && int(at::kShort) == 2 && int(at::kInt) == 3 &&
              int(at::kLong) == 4 && int(at::kHalf) == 5 && int(at::kFloat) == 6 && int(at::kDouble) == 7 &&
              int(at::kBool) == 11 && int(at::kBFloat16) == 15);

// Runs `function`, and returns its exception as a message.
template <class Function>
const char* attempt(const Function& function) {
  thread_local std::string message;
  try {
    function();
    return nullptr;
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

// ------------------------------------------------------------------------------------------------ tensors

at::TensorImpl* impl_of(void* owner) { return static_cast<at::TensorImpl*>(owner); }

at::Tensor tensor_of(void* owner) {
  return at::Tensor(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim_copy(impl_of(owner)));
}

// The tensor becomes the owner, if one is to be kept.
InflightMemory memory_of(const at::Tensor& tensor) {
  InflightMemory memory{};
  if (!tensor.defined()) return memory;
  memory.owner = tensor.unsafeGetTensorImpl();
  memory.dtype = int32_t(tensor.scalar_type());
  memory.item_size = int32_t(tensor.element_size());
  if (tensor.is_conj() || tensor.is_neg()) memory.flags |= kInflightIsLazy;
  if (!tensor.device().is_cpu()) return memory;
  memory.flags |= kInflightIsOnCpu;
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) return memory;
  memory.flags |= kInflightIsDense;
  memory.begin = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  memory.num_bytes = int64_t(tensor.storage().nbytes());
  return memory;
}

InflightTensor described(const at::Tensor& tensor) {
  InflightTensor made;
  made.memory = memory_of(tensor);
  made.data = nullptr, made.num_dims = 0;
  if (!made.memory.owner) return made;
  made.num_dims = tensor.dim();
  if (made.num_dims > kInflightMaxDims) return made;
  std::copy_n(tensor.sizes().data(), made.num_dims, made.sizes);
  if (!(made.memory.flags & kInflightIsDense)) {
    std::fill_n(made.strides, made.num_dims, 0);
    return made;
  }
  std::copy_n(tensor.strides().data(), made.num_dims, made.strides);
  made.data = made.memory.begin + tensor.storage_offset() * made.memory.item_size;
  return made;
}

at::Tensor view_of(const InflightTensor& tensor) {
  const InflightMemory& memory = tensor.memory;
  if (memory.flags & kInflightIsWhole) return tensor_of(memory.owner);
  const at::TensorImpl& base = *impl_of(memory.owner);
  const auto dtype = c10::scalarTypeToTypeMeta(at::ScalarType(memory.dtype));
  c10::Storage storage = base.storage();
  at::Tensor view =
      memory.flags & kInflightIsReused
          ? at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype)
          : at::detail::make_tensor<at::TensorImpl>(at::TensorImpl::VIEW, std::move(storage), base.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides({tensor.sizes, size_t(tensor.num_dims)},
                                                    {tensor.strides, size_t(tensor.num_dims)},
                                                    (tensor.data - memory.begin) / memory.item_size);
  return view;
}

void retain(void* owner) { c10::raw::intrusive_ptr::incref(impl_of(owner)); }
void release(void* owner) { c10::raw::intrusive_ptr::decref(impl_of(owner)); }

int32_t is_shared(void* owner) {
  const at::TensorImpl* tensor = impl_of(owner);
  return c10::raw::intrusive_ptr::use_count(impl_of(owner)) > 1 || tensor->storage().use_count() > 1;
}

// Gives the tensor's reference to the caller.
template <class Described>
Described given(Described described, at::Tensor&& tensor) {
  tensor.unsafeReleaseTensorImpl();
  return described;
}

const char* empty(const int64_t* sizes, int64_t num_dims, int32_t dtype, InflightTensor* made) {
  return attempt([&] {
    at::Tensor tensor = at::detail::empty_cpu(at::IntArrayRef(sizes, size_t(num_dims)), at::ScalarType(dtype));
    *made = given(described(tensor), std::move(tensor));
  });
}

const char* view(const InflightTensor* tensor, InflightTensor* made) {
  return attempt([&] {
    at::Tensor view = view_of(*tensor);
    *made = given(described(view), std::move(view));
  });
}

// ------------------------------------------------------------------------------------------------ threads, profiles

// While one exists, torch's operators run on the calling thread alone: waking torch's threads takes longer than small
// operators, and then they spin on cores that the kernels need.
class TorchAlone {
 public:
  TorchAlone() : omp_(omp_get_max_threads()), mkl_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {
    omp_set_num_threads(1);
  }
  ~TorchAlone() {
    omp_set_num_threads(omp_);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl_);
  }
  TorchAlone(const TorchAlone&) = delete;
  TorchAlone& operator=(const TorchAlone&) = delete;

 private:
  int omp_, mkl_;
};

int64_t num_threads() { return at::get_num_threads(); }

void begin_thread() {
  at::get_num_threads();   // torch sets its number when a thread first asks, and that must not come later
  omp_set_num_threads(1);  // for what torch's operators do within an item
}

void parallel_for(int64_t size, void (*work)(void*, int64_t, int64_t), void* data) {
  at::parallel_for(0, size, 1, [&](int64_t begin, int64_t end) { work(data, begin, end); });
}

void* begin_range(const char* name) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!callbacks.has_value()) return nullptr;
  auto* range = new at::RecordFunction(std::move(*callbacks));
  range->before(name);
  return range;
}
void end_range(void* range) { delete static_cast<at::RecordFunction*>(range); }

// ------------------------------------------------------------------------------------------------ torch's operators

// A call of an operator, of which some arguments are known.
class Call {
 public:
  Call(const char* name, const char* overload, const InflightArgument* arguments, int64_t num_arguments)
      : operator_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)) {
    const auto& schema = operator_.schema().arguments();
    TORCH_CHECK(size_t(num_arguments) == schema.size(), "an operator of a program has ", schema.size(),
                " arguments, not ", num_arguments);
    for (int64_t i = 0; i < num_arguments; ++i) {
      check_enumerator(schema[i].real_type(), arguments[i]);
      auto kind = ValueKind(arguments[i].value.kind);
      if (kind == kValueKindTensors && !schema[i].type()->isSubtypeOf(*c10::ListType::ofTensors())) kind = kValueKindOptionalTensors;
      kinds_.push_back(kind);
      known_.push_back(known(kind, arguments[i].value));
    }
  }

  Stack operator()(const InflightValue* values, int32_t how) const {
    Stack stack;
    stack.reserve(kinds_.size());
    for (size_t i = 0; i < kinds_.size(); ++i) stack.push_back(value(kinds_[i], known_[i], values[i]));
    std::optional<TorchAlone> alone;
    std::optional<c10::InferenceMode> is_inferring;
    if (how & kInflightInferring) is_inferring.emplace();
    if (how & kInflightAlone) alone.emplace();
    operator_.callBoxed(&stack);
    return stack;
  }

 private:
  // A number that takes part in type promotion as Python's do.
  template <class Number>
  static at::Tensor wrapped(Number number) {
    at::Tensor tensor = at::detail::empty_cpu({}, c10::CppTypeToScalarType<Number>::value);
    std::memcpy(tensor.mutable_data_ptr(), &number, sizeof number);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  // Torch does not ask whether there is a dtype, a layout or a memory format of a number.
  static void check_enumerator(c10::TypePtr type, const InflightArgument& argument) {
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    const auto kind = type->kind();
    if (kind != c10::TypeKind::ScalarTypeType && kind != c10::TypeKind::LayoutType &&
        kind != c10::TypeKind::MemoryFormatType)
      return;
    if (argument.value.kind == kValueKindNone) return;
    const int64_t number = argument.value.integer;
    TORCH_CHECK(argument.value.kind == kValueKindInteger && argument.is_fixed, "an operator takes no such enumerator");
    if (kind == c10::TypeKind::ScalarTypeType) {
      TORCH_CHECK(number >= 0 && number <= int64_t(at::kBFloat16) && !c10::isQIntType(at::ScalarType(number)),
                  "there is no dtype ", number, " here");
      return;
    }
    const int64_t last = kind == c10::TypeKind::LayoutType ? 0 : int64_t(at::MemoryFormat::ChannelsLast);
    TORCH_CHECK(number >= 0 && number <= last, "an operator takes no such enumerator");
  }

  static c10::IValue known(ValueKind kind, const InflightValue& value) {
    switch (kind) {
      case kValueKindNumber: return value.number;
      case kValueKindFlag: return value.integer != 0;
      case kValueKindNumberAsTensor: return wrapped(value.number);
      case kValueKindIntegerAsTensor: return wrapped(value.integer);
      case kValueKindWord: return word(value);
      case kValueKindDevice: return c10::Device(word(value));
      case kValueKindNumbers:
        return c10::List<double>(at::ArrayRef<double>(static_cast<const double*>(value.items), size_t(value.integer)));
      default: return {};
    }
  }

  static std::string word(const InflightValue& value) {
    return {static_cast<const char*>(value.items), size_t(value.integer)};
  }

  static c10::IValue value(ValueKind kind, const c10::IValue& known, const InflightValue& value) {
    const auto* tensors = static_cast<const InflightTensor*>(value.items);
    switch (kind) {
      case kValueKindInteger: return value.integer;
      case kValueKindTensor: return view_of(*tensors);
      case kValueKindIntegers: return at::IntArrayRef(static_cast<const int64_t*>(value.items), size_t(value.integer));
      case kValueKindTensors: {
        c10::List<at::Tensor> list;
        for (int64_t i = 0; i < value.integer; ++i) {
          TORCH_CHECK(tensors[i].memory.owner, "an operator takes no missing tensor");
          list.push_back(view_of(tensors[i]));
        }
        return list;
      }
      case kValueKindOptionalTensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (int64_t i = 0; i < value.integer; ++i)
          list.push_back(tensors[i].memory.owner ? std::optional(view_of(tensors[i])) : std::nullopt);
        return list;
      }
      default: return known;
    }
  }

  c10::OperatorHandle operator_;
  std::vector<ValueKind> kinds_;
  std::vector<c10::IValue> known_;
};

const char* new_operator(const char* name, const char* overload, const InflightArgument* arguments,
                         int64_t num_arguments, void** made) {
  return attempt([&] { *made = new Call(name, overload, arguments, num_arguments); });
}
void delete_operator(void* made) { delete static_cast<Call*>(made); }

const char* call_operator(void* made, const InflightValue* values, int32_t how, InflightValue* result) {
  thread_local std::vector<InflightTensor> results;
  return attempt([&] {
    Stack stack = (*static_cast<const Call*>(made))(values, how);
    results.clear();
    const auto give = [&](at::Tensor tensor) {
      // The kernels keep the address of its memory.
      if (tensor.defined() && tensor.has_storage()) tensor.storage().unsafeGetStorageImpl()->set_resizable(false);
      results.push_back(given(described(tensor), std::move(tensor)));
    };
    for (const c10::IValue& each : stack) {
      if (each.isTensor()) give(each.toTensor());
      if (each.isTensorList())
        for (const at::Tensor& tensor : each.toTensorList()) give(tensor);
    }
    *result = {kValueKindTensors, int64_t(results.size()), 0, results.data()};
  });
}

// ------------------------------------------------------------------------------------------------ our operators

// Torch's values as the kernels take them. They live as long as this and the stack.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, const Stack& stack) {
    const auto& arguments = schema.arguments();
    const size_t first = stack.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) values_.push_back(taken(stack[first + i]));
  }
  const InflightValue* data() const { return values_.data(); }

 private:
  InflightValue taken(const c10::IValue& value) {
    if (value.isNone()) return {};
    if (value.isTensor()) return {kValueKindTensor, 1, 0, tensors_.emplace_back(1, described(value.toTensor())).data()};
    if (value.isBool()) return {kValueKindFlag, value.toBool(), 0, nullptr};
    if (value.isInt()) return {kValueKindInteger, value.toInt(), 0, nullptr};
    if (value.isDouble()) return {kValueKindNumber, 0, value.toDouble(), nullptr};
    if (value.isString()) return taken(value.toStringRef());
    if (value.isTensorList()) {
      auto& own = tensors_.emplace_back();
      for (const at::Tensor& each : value.toTensorList()) own.push_back(described(each));
      return {kValueKindTensors, int64_t(own.size()), 0, own.data()};
    }
    if (value.isIntList()) {
      const auto& own = integers_.emplace_back(value.toIntVector());
      return {kValueKindIntegers, int64_t(own.size()), 0, own.data()};
    }
    if (value.isDoubleList()) {
      const auto& own = numbers_.emplace_back(value.toDoubleVector());
      return {kValueKindNumbers, int64_t(own.size()), 0, own.data()};
    }
    TORCH_CHECK(value.isList(), "our operators take no ", value.tagKind());
    auto& own = words_.emplace_back();  // of str, or empty
    for (const c10::IValue& each : value.toListRef()) own.push_back(taken(each.toStringRef()));
    return {kValueKindWords, int64_t(own.size()), 0, own.data()};
  }
  static InflightValue taken(const std::string& text) {
    return {kValueKindWord, int64_t(text.size()), 0, text.data()};
  }

  std::vector<InflightValue> values_;
  std::vector<std::vector<InflightTensor>> tensors_;
  std::vector<std::vector<int64_t>> integers_;
  std::vector<std::vector<double>> numbers_;
  std::vector<std::vector<InflightValue>> words_;
};

class OurOperator final : public c10::OperatorKernel {
 public:
  OurOperator(const InflightKernels& kernels, const InflightOperator& own) : kernels_(kernels), own_(own) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
    const c10::FunctionSchema& schema = handle.schema();
    InflightValue result{};
    const char* message = kernels_.run(&own_, Arguments(schema, *stack).data(), &result);
    TORCH_CHECK(!message, message);
    torch::jit::drop(*stack, schema.arguments().size());
    if (schema.returns().empty()) return;
    switch (schema.returns()[0].type()->kind()) {
      case c10::TypeKind::TensorType: return stack->push_back(taken(result, 0));
      case c10::TypeKind::IntType: return stack->push_back(result.integer);
      case c10::TypeKind::BoolType: return stack->push_back(result.integer != 0);
      default: {  // a list of tensors
        c10::List<at::Tensor> tensors;
        for (int64_t i = 0; i < result.integer; ++i) tensors.push_back(taken(result, i));
        stack->push_back(std::move(tensors));
      }
    }
  }

 private:
  static at::Tensor taken(const InflightValue& result, int64_t place) {
    const auto* tensors = static_cast<const InflightTensor*>(result.items);
    return at::Tensor(
        c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim(impl_of(tensors[place].memory.owner)));
  }

  const InflightKernels& kernels_;
  const InflightOperator& own_;
};

constexpr InflightTorch kTorch{retain,     release,      is_shared,   empty,     view,         num_threads,
                               begin_thread, parallel_for, begin_range, end_range, new_operator, delete_operator,
                               call_operator};

}  // namespace
}  // namespace inflight

// Registers a library's operators with torch, permanently. `connect` is its `inflight_kernels`. Returns a message, or
// null.
extern "C" __attribute__((visibility("default"))) const char* inflight_bridge(InflightConnect* connect) {
  using namespace inflight;
  return attempt([&] {
    const InflightKernels& kernels = *connect(&kTorch);
    auto* library = new torch::Library(torch::Library::DEF, "inflight", std::nullopt, __FILE__, __LINE__);
    for (int64_t i = 0; i < kernels.num_operators; ++i) {
      const InflightOperator& own = kernels.operators[i];
      auto function = torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OurOperator>(kernels, own));
      const std::string schema = own.schema;
      if (!own.is_for_cpu) {
        library->def(own.schema, std::move(function));
        continue;
      }
      library->def(own.schema);
      library->impl(schema.substr(0, schema.find('(')).c_str(), c10::DispatchKey::CPU, std::move(function));
    }
  });
}
