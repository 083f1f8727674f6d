// Small operators that run as one: a short list of instructions, carried out row by row, on registers that stay in the
// cache of a core. Every instruction rounds as torch's operator does, so the bits are torch's.
#pragma once

#include "tensor.h"

#include <vector>

#include "activate.h"
#include "reader.h"
#include "reused_memory.h"

namespace inflight {

// A part of a register: `length` floats of it from `offset` on, or a single one for all lanes.
struct Operand {
  int64_t index, offset;
  bool is_single;
};

// Rows in memory: where the row of each place in the kernel's space begins.
struct Rows {
  int64_t value;
  ScalarType dtype;  // float32 or bfloat16
  Size offset;
  std::vector<Size> strides;  // one for each dimension of the space
};

enum class Opcode : int64_t { kLoad, kStore, kCopy, kAdd, kSubtract, kMultiply, kDivide, kNegate, kSquare, kSquareRoot,
                              kReciprocalRoot, kSum, kActivate };

struct RowInstruction {
  Opcode code;
  int64_t length;  // elements of a row
  bool rounds;     // the result to bfloat16
  Operand to, a, b;
  Rows rows;  // of a load or a store
  Activation activation;
};

class RowKernel {
 public:
  explicit RowKernel(Reader& reader);

  // Reads some of the program's `values`, and sets those that the kernel makes.
  void run(std::vector<Memory>& values, const StepSize& step, ReusedMemory& memory) const;
  const std::vector<int64_t>& made() const { return made_; }  // values in reused memory

 private:
  struct Output {
    int64_t value;
    ScalarType dtype;
    Size length;
  };
  struct Constant {
    int64_t index;
    float number;
  };

  void check(const RowInstruction& at) const;

  std::vector<Size> space_;  // rows in each dimension
  std::vector<int64_t> registers_;  // where each begins
  int64_t num_floats_;  // in all registers
  std::vector<Constant> constants_;
  std::vector<Output> outputs_;
  std::vector<int64_t> made_;
  std::vector<RowInstruction> instructions_;
  int64_t work_ = 0;  // elements of all instructions of a row
};

}  // namespace inflight
