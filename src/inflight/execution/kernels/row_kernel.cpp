#include "row_kernel.h"

#include <array>
#include <cmath>

#include "activate.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

using format::Instruction;
using format::Operand;

constexpr int64_t kMinWork = 1 << 17;  // elements times instructions that are worth another thread
constexpr int64_t kMaxLength = 1 << 20;  // of a row
constexpr int64_t kMaxFloats = 1 << 24;  // in registers
constexpr int kMaxSpace = 6;

// To the nearest bfloat16 as torch rounds, with denormal numbers.
Floats rounded(Floats values) {
  const Bits bits = (Bits)values;
  const Bits to_nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  return values == values ? (Floats)to_nearest : values;
}

void store_row(const float* from, int64_t length, float* to) { std::copy_n(from, length, to); }
void store_row(const float* from, int64_t length, bfloat16* to) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) store(to + i, __builtin_convertvector(load<Bits>(from + i) >> 16, Halves));
  for (; i < length; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i].x = uint16_t(bits >> 16);
  }
}

template <class Value>
void load_row(const Value* from, int64_t length, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) store(to + i, load_floats(from + i));
  read_floats(from + i, length - i, to + i);
}

// The sum of a row in the order of torch's `sum` on a CPU (`cascade_sum` in ATen's SumKernel.cpp), so that the bits are
// the same: eight lanes, four sums side by side, each of several levels. That is how torch is built for x86; where it is
// built otherwise, the bits differ, and a proof finds that.
class TorchSum {
 public:
  static float of(const float* row, int64_t length) {
    const int64_t num_vectors = length / kWidth, steps = num_vectors / kSums;
    std::array<Lanes, kSums> sums = cascade(row, steps);
    for (int64_t i = steps * kSums; i < num_vectors; ++i) sums[0] += load<Lanes>(row + i * kWidth);
    for (int k = 1; k < kSums; ++k) sums[0] += sums[k];
    float total = 0;
    for (int64_t i = num_vectors * kWidth; i < length; ++i) total += row[i];
    for (int lane = 0; lane < kWidth; ++lane) total += sums[0][lane];
    return total;
  }

 private:
  static constexpr int kWidth = 8, kSums = 4, kLevels = 4;
  using Lanes = float __attribute__((vector_size(4 * kWidth)));

  static std::array<Lanes, kSums> cascade(const float* row, int64_t steps) {
    int64_t ceil_log2 = 0;
    while ((int64_t(1) << ceil_log2) < steps) ++ceil_log2;
    const int64_t power = std::max<int64_t>(4, ceil_log2 / kLevels), level_steps = int64_t(1) << power;
    Lanes sums[kLevels][kSums] = {};
    const auto add_step = [&](int64_t step) {
      for (int k = 0; k < kSums; ++k) sums[0][k] += load<Lanes>(row + (step * kSums + k) * kWidth);
    };
    int64_t step = 0;
    while (step + level_steps <= steps) {
      for (int64_t i = 0; i < level_steps; ++i) add_step(step++);
      for (int level = 1; level < kLevels; ++level) {
        for (int k = 0; k < kSums; ++k) {
          sums[level][k] += sums[level - 1][k];
          sums[level - 1][k] = Lanes{};
        }
        if (step & ((level_steps - 1) << (level * power))) break;
      }
    }
    while (step < steps) add_step(step++);
    std::array<Lanes, kSums> total;
    for (int k = 0; k < kSums; ++k) {
      for (int level = 1; level < kLevels; ++level) sums[0][k] += sums[level][k];
      total[k] = sums[0][k];
    }
    return total;
  }
};

// One row's registers. They lie in memory that the thread keeps.
class Registers {
 public:
  Registers(const std::vector<int64_t>& places, int64_t num_floats) : places_(places) {
    thread_local std::vector<Floats> floats;  // aligned: no load crosses a cache line
    const size_t num_vectors = (num_floats + kLanes - 1) / kLanes;
    if (floats.size() < num_vectors) floats.resize(num_vectors);
    floats_ = reinterpret_cast<float*>(floats.data());
  }
  float* operator[](const Operand& operand) { return floats_ + places_[operand.index] + operand.offset; }

  template <class Operation>
  void unary(const Instruction& at, const Operation& operation) {
    const float* a = (*this)[at.a];
    float* to = (*this)[at.to];
    for (int64_t i = 0; i < at.length; i += kLanes) {
      const Floats result = operation(load<Floats>(a + i));
      store(to + i, at.rounds ? rounded(result) : result);
    }
  }

  template <class Operation>
  void binary(const Instruction& at, const Operation& operation) {
    const float *a = (*this)[at.a], *b = (*this)[at.b];
    float* to = (*this)[at.to];
    const Floats all_a = broadcast(*a), all_b = broadcast(*b);
    for (int64_t i = 0; i < at.length; i += kLanes) {
      const Floats result = operation(at.a.is_single ? all_a : load<Floats>(a + i),
                                      at.b.is_single ? all_b : load<Floats>(b + i));
      store(to + i, at.rounds ? rounded(result) : result);
    }
  }

  void run(const Instruction& at) {
    switch (at.code) {
      case kOpcodeCopy: return unary(at, [](Floats a) { return a; });
      case kOpcodeAdd: return binary(at, [](Floats a, Floats b) { return a + b; });
      case kOpcodeSubtract: return binary(at, [](Floats a, Floats b) { return a - b; });
      case kOpcodeMultiply: return binary(at, [](Floats a, Floats b) { return a * b; });
      case kOpcodeDivide: return binary(at, [](Floats a, Floats b) { return a / b; });
      case kOpcodeNegate: return unary(at, [](Floats a) { return -a; });
      case kOpcodeSquare: return unary(at, [](Floats a) { return a * a; });
      case kOpcodeSquareRoot: return unary(at, square_root);
      case kOpcodeReciprocalRoot: return unary(at, [](Floats a) { return 1.f / square_root(a); });
      case kOpcodeRelu: return unary(at, relu);
      case kOpcodeSwish: return unary(at, swish);
      case kOpcodeGelu: return unary(at, gelu);
      case kOpcodeGeluTanh: return unary(at, gelu_tanh);
      case kOpcodeSum: *(*this)[at.to] = TorchSum::of((*this)[at.a], at.length); return;
      case kOpcodeLoad:
      case kOpcodeStore: break;
    }
    CHECK(false, "a row kernel has no instruction ", int64_t(at.code));
  }

 private:
  static Floats square_root(Floats values) {
#ifdef __AVX512F__
    return (Floats)_mm512_sqrt_ps((__m512)values);
#else
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = std::sqrt(values[lane]);
    return values;
#endif
  }

  const std::vector<int64_t>& places_;
  float* floats_;
};

// Where the rows of a load or a store begin in one step, and how many bytes apart they are in each dimension.
struct PlacedRows {
  char* first = nullptr;
  std::array<int64_t, kMaxSpace> strides{};

  char* at(const std::array<int64_t, kMaxSpace>& place, int num_dims) const {
    char* row = first;
    for (int dim = 0; dim < num_dims; ++dim) row += place[dim] * strides[dim];
    return row;
  }
};

PlacedRows place(const Instruction& at, const Memory& value, const std::array<int64_t, kMaxSpace>& sizes,
                 const StepSize& step) {
  PlacedRows placed;
  const format::Rows& rows = *at.rows;
  const int64_t offset = place_at(rows.offset, step), item_size = size_of(rows.dtype);
  __int128 end = offset + at.length;
  for (size_t dim = 0; dim < rows.strides.size(); ++dim) {
    const int64_t stride = place_at(rows.strides[dim], step);
    placed.strides[dim] = stride * item_size;
    end += __int128(stride) * (sizes[dim] - 1);
  }
  CHECK(value.defined() && value.scalar_type() == rows.dtype && end * item_size <= value.num_bytes(),
              "a row kernel would leave its memory");
  placed.first = value.begin() + offset * item_size;
  return placed;
}

void load(const Instruction& at, const char* row, float* to) {
  if (at.rows->dtype == kFloat) return load_row(reinterpret_cast<const float*>(row), at.length, to);
  load_row(reinterpret_cast<const bfloat16*>(row), at.length, to);
}

void store(const Instruction& at, const float* from, char* row) {
  if (at.rows->dtype == kFloat) return store_row(from, at.length, reinterpret_cast<float*>(row));
  store_row(from, at.length, reinterpret_cast<bfloat16*>(row));
}

bool touches_memory(const Instruction& at) { return at.code == kOpcodeLoad || at.code == kOpcodeStore; }

}  // namespace

RowKernel::RowKernel(format::RowKernel code) : code_(std::move(code)) {
  CHECK(code_.space.size() <= kMaxSpace, "a row kernel has too many dimensions");
  CHECK(code_.num_floats >= 0 && code_.num_floats <= kMaxFloats, "a row kernel cannot have ", code_.num_floats, " floats");
  for (const format::Constant& constant : code_.constants) {
    const int64_t first = code_.registers.at(constant.index);
    CHECK(0 <= first && first < code_.num_floats, "a row kernel would leave its registers");
  }
  for (const format::Output& output : code_.outputs) {
    CHECK(output.dtype == kFloat || output.dtype == kBFloat16, "rows must be float32 or bfloat16");
    made_.push_back(output.value);
  }
  for (const Instruction& at : code_.instructions) {
    check(at);
    work_ += at.length;
  }
}

// Refuses out-of-range registers. Instructions work on full vectors.
void RowKernel::check(const Instruction& at) const {
  CHECK(at.code >= 0 && at.code < std::ssize(kNumOperands) && at.length > 0 && at.length <= kMaxLength,
        "a row kernel has no such instruction");
  const auto check_operand = [&](const Operand& operand, bool is_single) {
    const int64_t first = code_.registers.at(operand.index), length = is_single ? 1 : round_up(at.length, kLanes);
    CHECK(0 <= first && first <= code_.num_floats && 0 <= operand.offset && operand.offset <= code_.num_floats &&
              first + operand.offset + length <= code_.num_floats,
          "a row kernel would leave its registers");
  };
  const int num_operands = kNumOperands[at.code];
  const bool is_binary = num_operands == 2;
  if (at.code != kOpcodeStore) check_operand(at.to, at.code == kOpcodeSum);
  if (num_operands > 0) check_operand(at.a, is_binary && at.a.is_single);
  if (is_binary) check_operand(at.b, at.b.is_single);
  if (!touches_memory(at)) return;
  CHECK(at.rows, "a load or a store needs rows");
  CHECK(at.rows->dtype == kFloat || at.rows->dtype == kBFloat16, "rows must be float32 or bfloat16");
  CHECK(at.rows->strides.size() == code_.space.size(), "rows must have a stride in each dimension");
}

void RowKernel::run(std::vector<Memory>& values, const StepSize& step, ReusedMemory& memory) const {
  const Range range("inflight::row_kernel");
  for (const format::Output& output : code_.outputs)
    values.at(output.value) = memory.take(place_at(output.numel, step), output.dtype);
  const std::vector<Instruction>& instructions = code_.instructions;
  const int num_dims = int(code_.space.size());
  std::array<int64_t, kMaxSpace> sizes{};
  int64_t num_rows = 1;
  for (int dim = 0; dim < num_dims; ++dim) {
    sizes[dim] = place_at(code_.space[dim], step);
    CHECK(num_rows * __int128(sizes[dim]) < kMaxPlace, "a row kernel has too many rows");
    num_rows *= sizes[dim];
  }
  if (num_rows == 0) return;
  std::vector<PlacedRows> placed(instructions.size());
  for (size_t i = 0; i < instructions.size(); ++i)
    if (touches_memory(instructions[i]))
      placed[i] = place(instructions[i], values.at(instructions[i].rows->value), sizes, step);
  const int64_t min_rows = std::max<int64_t>(1, kMinWork / std::max<int64_t>(1, work_));
  for_each_range(num_rows, min_rows, [&](int64_t begin, int64_t end) {
    Registers registers(code_.registers, code_.num_floats);
    for (const format::Constant& constant : code_.constants) *registers[{constant.index, 0, true}] = float(constant.number);
    for (int64_t row = begin; row < end; ++row) {
      std::array<int64_t, kMaxSpace> place{};
      for (int64_t dim = num_dims - 1, rest = row; dim >= 0; rest /= sizes[dim--]) place[dim] = rest % sizes[dim];
      for (size_t i = 0; i < instructions.size(); ++i) {
        const Instruction& at = instructions[i];
        if (at.code == kOpcodeLoad) {
          load(at, placed[i].at(place, num_dims), registers[at.to]);
        } else if (at.code == kOpcodeStore) {
          store(at, registers[at.a], placed[i].at(place, num_dims));
        } else {
          registers.run(at);
        }
      }
    }
  });
}

}  // namespace inflight
