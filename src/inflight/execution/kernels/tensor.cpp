#include "tensor.h"

#include <vector>

#include "parallel.h"

namespace inflight {

const InflightTorch* torch;

namespace {

constexpr struct {
  const char* name;
  int64_t size;
} kTypes[] = {{"Byte", 1},          {"Char", 1},        {"Short", 2},         {"Int", 4},  {"Long", 8},  {"Half", 2},
              {"Float", 4},         {"Double", 8},      {"ComplexHalf", 4},   {"ComplexFloat", 8},
              {"ComplexDouble", 16}, {"Bool", 1},        {"QInt8", 1},         {"QUInt8", 1}, {"QInt32", 4}, {"BFloat16", 2}};
constexpr int64_t kCopied = 1 << 16;  // bytes that are worth another thread

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

std::string_view name_of(ScalarType dtype) {
  const auto number = size_t(dtype);
  return number < std::size(kTypes) ? kTypes[number].name : "another dtype";
}

int64_t size_of(ScalarType dtype) {
  const auto number = size_t(dtype);
  CHECK(number < std::size(kTypes), "there is no dtype ", int64_t(dtype), " here");
  return kTypes[number].size;
}

float16::operator float() const {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, magnitude = x & 0x7fff;
  if (magnitude < 0x400) return float_of(sign | bits_of(float(magnitude) * 0x1p-24f));
  return float_of(sign | ((magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23)));
}

float16::float16(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  uint32_t rounded;
  if (magnitude > 0x7f800000) rounded = 0x7e00;                     // NaN
  else if (magnitude >= 0x477ff000) rounded = 0x7c00;               // beyond the greatest, half a step or more
  else if (magnitude < 0x38800000) rounded = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;  // in steps of 2^-24
  else rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  x = uint16_t(bits >> 16 & 0x8000) | uint16_t(rounded);
}

Tensor::Tensor(Memory memory, Sizes sizes) : memory_(std::move(memory)), data_(memory_.begin()), dims_(int64_t(sizes.size())) {
  std::copy_n(sizes.data(), dims_, sizes_);
  for (int64_t dim = dims_ - 1, stride = 1; dim >= 0; stride *= std::max<int64_t>(1, sizes_[dim--])) strides_[dim] = stride;
}

Tensor::Tensor(Memory memory, char* data, Sizes sizes, Sizes strides)
    : memory_(std::move(memory)), data_(data), dims_(int64_t(sizes.size())) {
  std::copy_n(sizes.data(), dims_, sizes_);
  std::copy_n(strides.data(), dims_, strides_);
}

InflightTensor Tensor::raw() const {
  InflightTensor raw;
  raw.memory = memory_.raw(), raw.data = data_, raw.num_dims = dims_;
  std::copy_n(sizes_, dims_, raw.sizes);
  std::copy_n(strides_, dims_, raw.strides);
  return raw;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  bool follows = true;
  for (int64_t dim = dims_ - 1; dim >= 0; --dim) {
    if (sizes_[dim] == 0) return true;
    follows &= sizes_[dim] == 1 || strides_[dim] == expected;
    expected *= sizes_[dim];
  }
  return follows;
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor Tensor::clone() const {
  Tensor copy = empty(sizes(), scalar_type());
  const Vectors vectors(*this);
  const int64_t bytes = dims_ ? sizes_[dims_ - 1] * element_size() : element_size();
  for_each_range(vectors.number(), kCopied / std::max<int64_t>(1, bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) vectors.copy(i, copy.data_ + i * bytes);
  });
  return copy;
}

Tensor Tensor::narrow(int64_t first, int64_t count) const {
  CHECK(0 <= first && 0 <= count && first + count <= size(0), "there are no rows from ", first, " to ", first + count);
  Tensor part = *this;
  part.data_ += first * stride(0) * element_size();
  part.sizes_[0] = count;
  return part;
}

Vectors::Vectors(const Tensor& tensor) : tensor_(tensor), item_size_(tensor.element_size()) {
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) number_ *= tensor.size(dim);
  if (tensor.dim() > 0) size_ = tensor.size(-1), stride_ = tensor.stride(-1);
}

const char* Vectors::at(int64_t number) const {
  const char* vector = static_cast<const char*>(tensor_.const_data_ptr());
  for (int64_t dim = tensor_.dim() - 2; dim >= 0 && number > 0; number /= tensor_.size(dim--))
    vector += number % tensor_.size(dim) * tensor_.stride(dim) * item_size_;
  return vector;
}

void Vectors::copy(int64_t number, char* to) const {
  const char* from = at(number);
  if (stride_ == 1) return void(std::memcpy(to, from, size_ * item_size_));
  for (int64_t i = 0; i < size_; ++i, from += stride_ * item_size_, to += item_size_) std::memcpy(to, from, item_size_);
}

Tensor padded_rows(const Tensor& x, int64_t num_inputs, ScalarType dtype) {
  const int64_t size = x.size(-1);
  const bool is_widened = dtype != x.scalar_type();
  if (size == num_inputs && !is_widened) return x.contiguous();
  const Vectors vectors(x);
  Tensor rows = empty({vectors.number(), num_inputs}, dtype);
  const int64_t bytes = num_inputs * rows.element_size();
  for_each_range(vectors.number(), kCopied / bytes, [&](int64_t begin, int64_t end) {
    thread_local std::vector<bfloat16> row;
    for (int64_t i = begin; i < end; ++i) {
      char* to = static_cast<char*>(rows.data_ptr()) + i * bytes;
      if (is_widened) {
        row.resize(size);
        vectors.copy(i, reinterpret_cast<char*>(row.data()));
        std::copy(row.begin(), row.end(), reinterpret_cast<float*>(to));
      } else {
        vectors.copy(i, to);
      }
      std::memset(to + size * rows.element_size(), 0, (num_inputs - size) * rows.element_size());
    }
  });
  return rows;
}

Tensor empty(Sizes sizes, ScalarType dtype) {
  CHECK(int64_t(sizes.size()) <= kMaxDims, "a tensor can have ", kMaxDims, " dimensions here, not ", sizes.size());
  InflightTensor raw;
  check_done(torch->empty(sizes.data(), int64_t(sizes.size()), int32_t(dtype), &raw));
  return {Memory::taken(raw.memory), raw};
}

Tensor zeros(Sizes sizes, ScalarType dtype) {
  Tensor made = empty(sizes, dtype);
  std::memset(made.data_ptr(), 0, made.nbytes());
  return made;
}

}  // namespace inflight
