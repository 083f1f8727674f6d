// How a program comes from Python: as lists of numbers and words, read in order.
#pragma once

#include "tensor.h"

#include <string>
#include <vector>

namespace inflight {

struct StepSize {
  int64_t tokens, logit_rows;
};

// The most that a size, a stride or an offset in memory may be: so no product of two of them overflows.
constexpr int64_t kMaxPlace = int64_t(1) << 40;

// A number that grows with a step.
struct Size {
  int64_t fixed, per_token, per_logit_row;
  int64_t at(const StepSize& step) const {
    return fixed + per_token * step.tokens + per_logit_row * step.logit_rows;
  }
  // The same, where it is a place in memory.
  int64_t place_at(const StepSize& step) const {
    __int128 place = fixed;
    place += __int128(per_token) * step.tokens + __int128(per_logit_row) * step.logit_rows;
    CHECK(place >= 0 && place < kMaxPlace, "a program asks for too much memory");
    return int64_t(place);
  }
};

// The dtype of a number. Refuses what no kernel of ours or of torch's for a CPU computes with.
inline ScalarType as_dtype(int64_t number) {
  const auto dtype = ScalarType(number);
  CHECK(number >= 0 && number <= int64_t(kBFloat16) && (number < 12 || number > 14), "there is no dtype ", number,
              " here");
  return dtype;
}

class Reader {
 public:
  Reader(Sizes codes, std::span<const double> numbers, const std::vector<std::string>& words)
      : codes_(codes), numbers_(numbers), words_(words) {}

  int64_t code() {
    CHECK(next_ < codes_.size(), "a program ends too early");
    return codes_[next_++];
  }
  double number() {
    const int64_t index = code();
    CHECK(index >= 0 && index < int64_t(numbers_.size()), "a program has no number ", index);
    return numbers_[index];
  }
  const std::string& word() { return words_.at(code()); }
  bool flag() { return code() != 0; }
  ScalarType dtype() { return as_dtype(code()); }
  Size size() {
    const int64_t fixed = code(), per_token = code();
    return {fixed, per_token, code()};
  }

  // What `read` reads, as often as the next number says.
  template <class Read>
  auto list(const Read& read) {
    std::vector<decltype(read())> values;
    for (int64_t left = code(); left > 0; --left) values.push_back(read());
    return values;
  }
  std::vector<Size> sizes() { return list([&] { return size(); }); }

 private:
  Sizes codes_;
  std::span<const double> numbers_;
  const std::vector<std::string>& words_;
  size_t next_ = 0;
};

}  // namespace inflight
