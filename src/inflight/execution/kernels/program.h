// A program: a traced forward pass as a list of operators and row kernels, which runs without Python.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "linear.h"
#include "reader.h"
#include "row_kernel.h"

namespace inflight {

// A view of one of the program's values.
Tensor view_of(const format::View& view, const std::vector<Memory>& values, const StepSize& step);

// One of ours, by its name without a namespace; null: there is none.
const InflightOperator* find_operator(std::string_view name);

// Calls one operator of torch's, or of ours.
class OperatorCall {
 public:
  explicit OperatorCall(format::OperatorCall code);
  void run(std::vector<Memory>& values, const StepSize& step, ReusedMemory&) const;
  std::vector<int64_t> made() const { return {}; }  // in reused memory: torch takes its own

 private:
  struct Delete {
    void operator()(void* made) const { torch->delete_operator(made); }
  };
  std::vector<Memory> call(const std::vector<InflightValue>& arguments, int32_t how) const;
  std::vector<Memory> call_own(const std::vector<InflightValue>& arguments) const;
  bool is_dealt_out(const std::vector<InflightValue>& arguments) const;
  std::vector<Memory> deal_out(std::vector<InflightValue> arguments) const;

  format::OperatorCall code_;
  std::unique_ptr<void, Delete> operator_;
  const InflightOperator* own_ = nullptr;  // instead
  bool is_torchs_, is_layer_norm_;
};

// Calls a linear layer of ours without looking it up.
struct LinearCall {
  std::shared_ptr<const Linear> linear;
  format::View input;
  int64_t output;  // a value

  void run(std::vector<Memory>& values, const StepSize& step, ReusedMemory& memory) const;
  std::vector<int64_t> made() const { return {output}; }  // values in reused memory
};

// The linear layer of a number.
using FindLinear = std::function<std::shared_ptr<const Linear>(int64_t)>;

class Program {
 public:
  Program(format::Program code, const std::vector<Tensor>& constants, const FindLinear& find_linear);

 private:
  friend class ProgramRun;
  struct Item {
    std::variant<OperatorCall, RowKernel, LinearCall> work;
    std::vector<int64_t> released;  // values no longer needed
    const Linear* next_linear = nullptr;  // of a row kernel: the layer that comes after it
  };

  std::vector<Memory> values_;  // the constants, each in its place
  std::vector<Item> items_;
  std::vector<format::View> outputs_;
  std::vector<bool> is_reused_;  // of each value: whether it is in reused memory
  mutable ReusedMemory memory_;  // of the last run
  mutable std::mutex mutex_;
};

// One run of a program, in pieces if the caller likes.
class ProgramRun {
 public:
  // Token ids `[T]`, positions `[T]` and logit rows `[R]`, all int64.
  ProgramRun(std::shared_ptr<const Program> program, const Tensor& input_ids, const Tensor& positions,
             const Tensor& logit_rows);
  ~ProgramRun();
  ProgramRun(const ProgramRun&) = delete;

  // Runs the next items, at most `num_items`. Returns whether any are left.
  bool advance(int64_t num_items);

  // The program's outputs.
  std::vector<Tensor> outputs() const;

 private:
  int64_t num_small_items(int64_t most) const;
  void run(const Program::Item& item);

  std::shared_ptr<const Program> program_;
  StepSize step_;
  ReusedMemory memory_;
  std::vector<Memory> values_;
  size_t next_ = 0;
};

}  // namespace inflight
