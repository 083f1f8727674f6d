// Fused small operators: a short list of instructions, executed row by row, on registers that stay in a core's cache.
// Every instruction rounds as torch's operator does, so the bits are torch's.
#pragma once

#include "tensor.h"

#include <vector>

#include "reader.h"
#include "reused_memory.h"

namespace inflight {

class RowKernel {
 public:
  explicit RowKernel(format::RowKernel code);

  // Reads some of the program's `values`, and sets the kernel's results.
  void run(std::vector<Memory>& values, const StepSize& step, ReusedMemory& memory) const;
  const std::vector<int64_t>& made() const { return made_; }  // values in reused memory

 private:
  void check(const format::Instruction& at) const;

  format::RowKernel code_;
  std::vector<int64_t> made_;
  int64_t work_ = 0;  // elements of all instructions of a row
};

}  // namespace inflight
