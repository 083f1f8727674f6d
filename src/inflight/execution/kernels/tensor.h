// Views of torch's tensors for the kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "bridge.h"

namespace inflight {

// ------------------------------------------------------------------------------------------------ refusals

enum class ScalarType : int32_t { kByte, kChar, kShort, kInt, kLong, kHalf, kFloat, kDouble, kBool = 11, kBFloat16 = 15 };
using enum ScalarType;  // torch's numbers; there are more

std::string_view name_of(ScalarType dtype);

inline void append(std::string& text, std::string_view part) { text += part; }
inline void append(std::string& text, ScalarType dtype) { text += name_of(dtype); }
inline void append(std::string& text, char) = delete;
template <class Integer>
  requires std::is_integral_v<Integer>
void append(std::string& text, Integer number) {
  text += std::to_string(number);
}

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

#define CHECK(condition, ...) \
  do {                        \
    if (!(condition)) [[unlikely]] ::inflight::fail(__VA_ARGS__); \
  } while (false)

// The message of a bridge function.
inline void check_done(const char* message) { CHECK(!message, message); }

// ------------------------------------------------------------------------------------------------ numbers

struct bfloat16 {
  uint16_t x;

  bfloat16() = default;
  explicit bfloat16(float value) {  // to the nearest, ties to even, NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    x = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

struct float16 {
  uint16_t x;

  float16() = default;
  float16(float value);  // to the nearest, ties to even
  operator float() const;
};

template <class Value>
constexpr ScalarType kTypeOf = ScalarType(-1);
template <> inline constexpr ScalarType kTypeOf<uint8_t> = kByte;
template <> inline constexpr ScalarType kTypeOf<int8_t> = kChar;
template <> inline constexpr ScalarType kTypeOf<int16_t> = kShort;
template <> inline constexpr ScalarType kTypeOf<int32_t> = kInt;
template <> inline constexpr ScalarType kTypeOf<int64_t> = kLong;
template <> inline constexpr ScalarType kTypeOf<float16> = kHalf;
template <> inline constexpr ScalarType kTypeOf<float> = kFloat;
template <> inline constexpr ScalarType kTypeOf<bfloat16> = kBFloat16;

// Bytes of an element, of the dtypes up to bfloat16.
int64_t size_of(ScalarType dtype);

// ------------------------------------------------------------------------------------------------ tensors

using Sizes = std::span<const int64_t>;
constexpr int64_t kMaxDims = kInflightMaxDims;

// Of torch.
extern const InflightTorch* torch;

// The memory of a torch tensor; and that tensor, where the kernels only pass it on.
class Memory {
 public:
  Memory() = default;
  // With a reference of its own, or with the one that is given.
  static Memory shared(const InflightMemory& memory) { return taken(memory).retained(); }
  static Memory taken(const InflightMemory& memory) {
    Memory made;
    made.raw_ = memory;
    return made;
  }
  Memory(const Memory& other) : raw_(other.raw_) { retain(); }
  Memory(Memory&& other) noexcept : raw_(std::exchange(other.raw_, {})) {}
  Memory& operator=(Memory other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Memory() {
    if (raw_.owner) torch->release(raw_.owner);
  }

  const InflightMemory& raw() const { return raw_; }
  bool defined() const { return raw_.owner; }
  bool is_dense() const { return raw_.flags & kInflightIsDense; }
  bool is_on_cpu() const { return raw_.flags & kInflightIsOnCpu; }
  bool is_lazy() const { return raw_.flags & kInflightIsLazy; }
  bool is_shared() const { return torch->is_shared(raw_.owner); }
  char* begin() const { return raw_.begin; }
  int64_t num_bytes() const { return raw_.num_bytes; }
  ScalarType scalar_type() const { return ScalarType(raw_.dtype); }
  void reset() { *this = {}; }
  void set_type(ScalarType dtype) { raw_.dtype = int32_t(dtype), raw_.item_size = int32_t(size_of(dtype)); }
  void add_flags(int32_t flags) { raw_.flags |= flags; }

 private:
  Memory retained() && {
    retain();
    return std::move(*this);
  }
  void retain() const {
    if (raw_.owner) torch->retain(raw_.owner);
  }

  InflightMemory raw_{};
};

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const InflightTensor& raw) : Tensor(Memory::shared(raw.memory), raw) {}
  Tensor(Memory memory, const InflightTensor& raw) : memory_(std::move(memory)), data_(raw.data), dims_(raw.num_dims) {
    CHECK(dims_ <= kMaxDims, "a tensor can have ", kMaxDims, " dimensions here, not ", dims_);
    std::copy_n(raw.sizes, dims_, sizes_);
    std::copy_n(raw.strides, dims_, strides_);
  }
  // In one piece, from the beginning of memory.
  Tensor(Memory memory, Sizes sizes);
  Tensor(Memory memory, char* data, Sizes sizes, Sizes strides);

  InflightTensor raw() const;
  const Memory& memory() const { return memory_; }
  bool defined() const { return memory_.defined(); }
  ScalarType scalar_type() const { return memory_.scalar_type(); }
  int64_t element_size() const { return memory_.raw().item_size; }
  int64_t dim() const { return dims_; }
  Sizes sizes() const { return {sizes_, size_t(dims_)}; }
  int64_t size(int64_t dim) const { return sizes_[place_of(dim)]; }
  int64_t stride(int64_t dim) const { return strides_[place_of(dim)]; }
  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes()) product *= size;
    return product;
  }
  int64_t nbytes() const { return numel() * element_size(); }
  bool is_contiguous() const;

  const void* const_data_ptr() const { return data_; }
  void* data_ptr() const { return data_; }
  template <class Value>
  const Value* const_data_ptr() const {
    return data_ptr<Value>();
  }
  template <class Value>
  Value* data_ptr() const {
    CHECK(scalar_type() == kTypeOf<Value>, "expected scalar type ", kTypeOf<Value>, " but found ", scalar_type());
    return reinterpret_cast<Value*>(data_);
  }

  // This, if it is in one piece; else a copy.
  Tensor contiguous() const;
  // A copy in one piece.
  Tensor clone() const;
  // Rows [first, first + count), of the first dimension.
  Tensor narrow(int64_t first, int64_t count) const;

 private:
  int64_t place_of(int64_t dim) const {
    if (dim < 0) dim += dims_;
    CHECK(0 <= dim && dim < dims_, "a tensor of ", dims_, " dimensions has no dimension ", dim);
    return dim;
  }

  Memory memory_;
  char* data_ = nullptr;
  int64_t dims_ = 0;
  int64_t sizes_[kMaxDims], strides_[kMaxDims];
};

// Vectors along the last dimension of a tensor of any strides, by number.
class Vectors {
 public:
  explicit Vectors(const Tensor& tensor);
  int64_t number() const { return number_; }
  const char* at(int64_t number) const;
  // Copies its elements to where they lie side by side.
  void copy(int64_t number, char* to) const;

 private:
  const Tensor& tensor_;
  int64_t number_ = 1, size_ = 1, stride_ = 1, item_size_;
};

// Rows `[…, in]`, float32 or bfloat16, in one piece, with zeros up to `num_inputs` each; of their own dtype, or widened to
// float32.
Tensor padded_rows(const Tensor& x, int64_t num_inputs, ScalarType dtype);

Tensor empty(Sizes sizes, ScalarType dtype);
Tensor zeros(Sizes sizes, ScalarType dtype);
inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return empty(Sizes(sizes.begin(), sizes.size()), dtype);
}
inline Tensor zeros(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return zeros(Sizes(sizes.begin(), sizes.size()), dtype);
}

}  // namespace inflight
