// A recorded forward pass: a list of operators and row kernels that runs without Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "linear.h"
#include "reader.h"
#include "row_kernel.h"

namespace inflight {

// A tensor as a view of the memory of one of the program's values.
struct ValueView {
  int64_t value;
  bool is_opaque;  // a tensor of oneDNN's, which is the value itself
  at::ScalarType dtype;
  std::vector<Size> sizes, strides;
  Size offset;

  at::Tensor of(const std::vector<at::Tensor>& values, const StepSize& step) const;
};

// Calls one operator of torch's, or of ours.
class OperatorCall {
 public:
  explicit OperatorCall(Reader& reader);
  void run(std::vector<at::Tensor>& values, const StepSize& step, ReusedMemory&) const;
  std::vector<int64_t> made() const { return {}; }  // in reused memory: torch takes its own

 private:
  struct ViewList {
    std::vector<std::optional<ValueView>> views;
    bool are_optional;  // as the operator declares them
  };
  using Argument = std::variant<c10::IValue, Size, ValueView, std::vector<Size>, ViewList>;

  Argument read_argument(Reader& reader, const c10::TypePtr& type) const;
  static void check_enumerator(c10::TypePtr type, const Argument& argument);
  c10::IValue value_of(const Argument& argument, const std::vector<at::Tensor>& values, const StepSize& step) const;

  c10::OperatorHandle operator_;
  std::vector<Argument> arguments_;
  bool is_torchs_, is_layer_norm_;
  std::vector<int64_t> outputs_;  // values
};

// Calls a linear layer of ours without looking it up.
struct LinearCall {
  std::shared_ptr<const Linear> linear;
  ValueView input;
  int64_t output;  // a value

  void run(std::vector<at::Tensor>& values, const StepSize& step, ReusedMemory& memory) const;
  std::vector<int64_t> made() const { return {output}; }  // values in reused memory
};

// The linear layer of a number.
using FindLinear = std::function<std::shared_ptr<const Linear>(int64_t)>;

class Program {
 public:
  Program(Reader& reader, const std::vector<at::Tensor>& constants, const FindLinear& find_linear);

 private:
  friend class ProgramRun;
  struct Item {
    std::variant<OperatorCall, RowKernel, LinearCall> work;
    std::vector<int64_t> released;  // values that nothing needs any more
    const Linear* next_linear = nullptr;  // of a row kernel: the layer that comes after it
  };

  std::vector<at::Tensor> values_;  // the constants, each in its place
  std::vector<Item> items_;
  std::vector<ValueView> outputs_;
  std::vector<bool> is_reused_;  // of each value: whether it lies in memory that serves again
  mutable ReusedMemory memory_;  // of the last run
  mutable std::mutex mutex_;
};

// One run of a program, which a caller may carry out piece by piece.
class ProgramRun {
 public:
  // Token ids `[T]`, positions `[T]` and logit rows `[R]`, all int64.
  ProgramRun(std::shared_ptr<const Program> program, const at::Tensor& input_ids, const at::Tensor& positions,
             const at::Tensor& logit_rows);
  ~ProgramRun();
  ProgramRun(const ProgramRun&) = delete;

  // Carries out the next items, at most so many. Returns whether any are left.
  bool advance(int64_t num_items);

  // What the program gives, at the end.
  std::vector<at::Tensor> outputs() const;

 private:
  int64_t num_small_items(int64_t most) const;
  void run(const Program::Item& item);

  std::shared_ptr<const Program> program_;
  StepSize step_;
  ReusedMemory memory_;
  std::vector<at::Tensor> values_;
  size_t next_ = 0;
};

}  // namespace inflight
