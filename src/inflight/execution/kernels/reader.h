// Reads a program: lists of codes, numbers and words, in order.
#pragma once

#include "tensor.h"

#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace inflight {

struct StepSize {
  int64_t tokens, logit_rows;
};

// The most of a size, a stride or an offset, so that no product of two overflows.
constexpr int64_t kMaxPlace = int64_t(1) << 40;

// A number that grows with a step, in one step.
inline int64_t at(const format::Size& size, const StepSize& step) {
  return size.fixed + size.per_token * step.tokens + size.per_logit_row * step.logit_rows;
}
// The same, where it is a place in memory.
inline int64_t place_at(const format::Size& size, const StepSize& step) {
  __int128 place = size.fixed;
  place += __int128(size.per_token) * step.tokens + __int128(size.per_logit_row) * step.logit_rows;
  CHECK(place >= 0 && place < kMaxPlace, "a program asks for too much memory");
  return int64_t(place);
}

// The dtype of a number. Refuses what no kernel of ours or of torch's for a CPU computes with.
inline ScalarType as_dtype(int64_t number) {
  const auto dtype = ScalarType(number);
  CHECK(number >= 0 && number <= int64_t(kBFloat16) && (number < 12 || number > 14), "there is no dtype ", number,
              " here");
  return dtype;
}

// Reads the layouts of `program_format.h`.
class Reader {
 public:
  Reader(Sizes codes, std::span<const double> numbers, const std::vector<std::string>& words)
      : codes_(codes), numbers_(numbers), words_(words) {}

  void operator()(auto&... fields) { (read(fields), ...); }

 private:
  int64_t code() {
    CHECK(next_ < codes_.size(), "a program ends too early");
    return codes_[next_++];
  }
  void read(int64_t& integer) { integer = code(); }
  void read(bool& flag) { flag = code() != 0; }
  void read(double& number) {
    const int64_t index = code();
    CHECK(index >= 0 && index < int64_t(numbers_.size()), "a program has no number ", index);
    number = numbers_[index];
  }
  void read(std::string& word) { word = words_.at(code()); }
  void read(ScalarType& dtype) { dtype = as_dtype(code()); }
  void read(ValueKind& kind) { kind = ValueKind(code()); }
  void read(Opcode& opcode) { opcode = Opcode(code()); }
  template <class Value>
  void read(std::vector<Value>& values) {
    for (int64_t left = code(); left > 0; --left) read(values.emplace_back());
  }
  template <class Value>
  void read(std::optional<Value>& value) {
    if (code() != 0) read(value.emplace());
  }
  template <class... Options>
  void read(std::variant<Options...>& value) {
    int64_t option = code();
    const bool is_known = ((option-- == 0 && (read(value.template emplace<Options>()), true)) || ...);
    CHECK(is_known, "a program has work of no known kind");
  }
  void read(auto& layout) { layout.read(*this); }

  Sizes codes_;
  std::span<const double> numbers_;
  const std::vector<std::string>& words_;
  size_t next_ = 0;
};

}  // namespace inflight
