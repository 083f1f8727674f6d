// Generated from execution/graph/program.py by tools/program_header.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace inflight {

enum class ScalarType : int32_t;

enum ValueKind : int64_t {
  kValueKindNone = 0,
  kValueKindInteger = 1,
  kValueKindNumber = 2,
  kValueKindFlag = 3,
  kValueKindTensor = 4,
  kValueKindIntegers = 5,
  kValueKindTensors = 6,
  kValueKindNumberAsTensor = 7,
  kValueKindIntegerAsTensor = 8,
  kValueKindWord = 9,
  kValueKindDevice = 10,
  kValueKindNumbers = 11,
  kValueKindWords = 12,
  kValueKindOptionalTensors = 13,
};
enum Opcode : int64_t {
  kOpcodeLoad = 0,
  kOpcodeStore = 1,
  kOpcodeCopy = 2,
  kOpcodeAdd = 3,
  kOpcodeSubtract = 4,
  kOpcodeMultiply = 5,
  kOpcodeDivide = 6,
  kOpcodeNegate = 7,
  kOpcodeSquare = 8,
  kOpcodeSquareRoot = 9,
  kOpcodeReciprocalRoot = 10,
  kOpcodeSum = 11,
  kOpcodeRelu = 12,
  kOpcodeSwish = 13,
  kOpcodeGelu = 14,
  kOpcodeGeluTanh = 15,
};
constexpr int kNumOperands[] = {0, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr int64_t kNumInputs = 3;  // the first values of a program

namespace format {

struct Size {
  int64_t fixed;
  int64_t per_token;
  int64_t per_logit_row;
  void read(auto& fields) { fields(fixed, per_token, per_logit_row); }
};

struct View {
  int64_t value;
  ScalarType dtype;
  std::vector<Size> sizes;
  std::vector<Size> strides;
  Size offset;
  bool is_opaque;
  void read(auto& fields) { fields(value, dtype, sizes, strides, offset, is_opaque); }
};

struct Argument {
  ValueKind kind;
  std::vector<Size> sizes;
  std::vector<double> numbers;
  std::vector<std::optional<View>> views;
  std::string word;
  void read(auto& fields) { fields(kind, sizes, numbers, views, word); }
};

struct OperatorCall {
  std::string name;
  std::string overload;
  std::vector<Argument> arguments;
  std::vector<int64_t> outputs;
  void read(auto& fields) { fields(name, overload, arguments, outputs); }
};

struct LinearCall {
  int64_t linear;
  View input;
  int64_t output;
  void read(auto& fields) { fields(linear, input, output); }
};

struct Operand {
  int64_t index;
  int64_t offset;
  bool is_single;
  void read(auto& fields) { fields(index, offset, is_single); }
};

struct Rows {
  int64_t value;
  ScalarType dtype;
  Size offset;
  std::vector<Size> strides;
  void read(auto& fields) { fields(value, dtype, offset, strides); }
};

struct Instruction {
  Opcode code;
  int64_t length;
  Operand to;
  Operand a;
  Operand b;
  bool rounds;
  std::optional<Rows> rows;
  void read(auto& fields) { fields(code, length, to, a, b, rounds, rows); }
};

struct Constant {
  int64_t index;
  double number;
  void read(auto& fields) { fields(index, number); }
};

struct Output {
  int64_t value;
  ScalarType dtype;
  Size numel;
  void read(auto& fields) { fields(value, dtype, numel); }
};

struct RowKernel {
  std::vector<Size> space;
  std::vector<int64_t> registers;
  int64_t num_floats;
  std::vector<Constant> constants;
  std::vector<Output> outputs;
  std::vector<Instruction> instructions;
  void read(auto& fields) { fields(space, registers, num_floats, constants, outputs, instructions); }
};

struct Item {
  std::variant<OperatorCall, RowKernel, LinearCall> work;
  std::vector<int64_t> released;
  void read(auto& fields) { fields(work, released); }
};

struct Program {
  int64_t num_values;
  std::vector<int64_t> constants;
  std::vector<Item> items;
  std::vector<View> outputs;
  void read(auto& fields) { fields(num_values, constants, items, outputs); }
};

}  // namespace format
}  // namespace inflight
