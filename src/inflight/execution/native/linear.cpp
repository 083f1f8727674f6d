#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "convert.h"

namespace inflight {
namespace {

using Scalars = c10::List<std::optional<at::Scalar>>;
constexpr int kZeroPoint = 128;  // x86 multiplies unsigned by signed: activations are shifted by this

at::Tensor apply_float(const Linear& linear, const at::Tensor& x) {
  using Operator = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                              Scalars, std::optional<std::string_view>);
  static const auto linear_pointwise =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Operator>();
  return linear_pointwise.call(x, linear.packed, linear.bias, linear.activation, Scalars(), linear.variant);
}

// Rounds a row to [1, 255] around kZeroPoint; returns its scale, NaN if the row is not finite.
template <class Value>
float quantise_row(const Value* from, int64_t size, uint8_t* to) {
  Floats largest{};
  Floats not_finite{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats values = load_floats(from + i);
    largest = max(largest, max(values, -values));
    not_finite += values - values;
  }
  float maximum = max_of_lanes(largest);
  float poison = sum_of_lanes(not_finite);
  for (int64_t j = i; j < size; ++j) {
    const float value = float(from[j]);
    maximum = std::max(maximum, std::abs(value));
    poison += value - value;
  }
  if (poison != 0) {  // NaN
    std::fill_n(to, size, uint8_t(kZeroPoint));
    return poison;
  }
  const float inverse = maximum > 0 ? 127 / maximum : 0;
  using Narrow = uint8_t __attribute__((vector_size(16)));
  constexpr float kRounder = 12582912.f;
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const Floats shifted = load_floats(from + i) * inverse + kRounder;
    store(to + i, __builtin_convertvector((Ints)shifted - (0x4B400000 - kZeroPoint), Narrow));
  }
  for (; i < size; ++i) {
    const volatile float scaled = float(from[i]) * inverse + kRounder;
    to[i] = uint8_t(std::lrint(scaled - kRounder) + kZeroPoint);
  }
  return maximum / 127;
}

template <class Value>
at::Tensor apply_int8(const Linear& linear, const at::Tensor& x) {
  using Operator = at::Tensor(at::Tensor, double, int64_t, at::Tensor, at::Tensor, at::Tensor,
                              std::optional<at::Tensor>, double, int64_t, std::optional<at::ScalarType>,
                              std::string_view, Scalars, std::string_view);
  static const auto qlinear = c10::Dispatcher::singleton().findSchemaOrThrow("onednn::qlinear_pointwise", "").typed<Operator>();
  const int64_t in = x.size(-1), num_rows = x.numel() / in;
  at::Tensor quantised = at::empty({num_rows, in}, x.options().dtype(at::kByte));
  std::vector<float> row_scales(num_rows);
  at::parallel_for(0, num_rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      row_scales[row] =
          quantise_row(x.const_data_ptr<Value>() + row * in, in, quantised.data_ptr<uint8_t>() + row * in);
  });
  const at::Tensor sums = qlinear.call(quantised, 1.0, kZeroPoint, linear.packed, *linear.scales, *linear.zero_points,
                                       std::nullopt, 1.0, 0, at::kFloat, "none", Scalars(), "");
  const int64_t out = sums.size(-1);
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  at::Tensor output = at::empty(sizes, x.options());
  const Value* bias = linear.bias ? linear.bias->const_data_ptr<Value>() : nullptr;
  at::parallel_for(0, num_rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *from = sums.const_data_ptr<float>() + row * out, scale = row_scales[row];
      Value* to = output.data_ptr<Value>() + row * out;
      for (int64_t i = 0; i < out; ++i) store_float(from[i] * scale + (bias ? float(bias[i]) : 0.f), to + i);
    }
  });
  return output;
}

}  // namespace

at::Tensor apply(const Linear& linear, const at::Tensor& x, int64_t out_features) {
  if (x.numel() == 0) {
    auto sizes = x.sizes().vec();
    sizes.back() = out_features;
    return at::empty(sizes, x.options());
  }
  if (!linear.scales) return apply_float(linear, x);
  const at::Tensor rows = x.contiguous();
  if (rows.scalar_type() == at::kFloat) return apply_int8<float>(linear, rows);
  TORCH_CHECK(rows.scalar_type() == at::kBFloat16, "an int8 layer takes float32 or bfloat16, not ", rows.scalar_type());
  return apply_int8<at::BFloat16>(linear, rows);
}

}  // namespace inflight
