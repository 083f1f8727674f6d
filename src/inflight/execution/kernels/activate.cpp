#include "activate.h"

#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {

Floats relu(Floats x) { return x < 0.f ? Floats{} : x; }
Floats swish(Floats x) { return x / (exp(-x) + 1.f); }
Floats sigmoid(Floats x) { return 1.f / (exp(-x) + 1.f); }
Floats softplus(Floats x) { return (x > 0.f ? x : Floats{}) + log1p_to_one(exp(x > 0.f ? -x : x)); }
Floats gelu_tanh(Floats x) {
  const Floats inner = (x + x * x * x * 0.044715f) * 0.7978845608f;
  return x * 0.5f * (tanh(inner) + 1.f);
}
Floats gelu(Floats x) { return x * 0.5f * (erf(x * 0.7071067812f) + 1.f); }

namespace {

// A partial vector is computed like a full one.
template <class Value>
void activate_rows(const Tensor& x, Tensor& output, Activation function) {
  const int64_t size = x.size(-1), num_rows = x.numel() / std::max<int64_t>(size, 1);
  const int64_t stride = x.dim() > 1 ? x.stride(-2) : size;
  for_each_range(num_rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Value* from = x.const_data_ptr<Value>() + row * stride;
      Value* to = output.data_ptr<Value>() + row * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, size - i);
        if (count == kLanes) {
          store_floats(function(load_floats(from + i)), to + i);
          continue;
        }
        float lanes[kLanes] = {};
        read_floats(from + i, count, lanes);
        store(lanes, function(load<Floats>(lanes)));
        for (int64_t lane = 0; lane < count; ++lane) store_float(lanes[lane], to + i + lane);
      }
    }
  });
}

}  // namespace

Activation find_activation(std::string_view activation, std::string_view variant) {
  if (activation == "none") return nullptr;
  if (activation == "relu") return relu;
  if (activation == "swish") return swish;
  if (activation == "sigmoid") return sigmoid;
  if (activation == "softplus") return softplus;
  if (activation == "exp") return [](Floats x) { return exp(x); };
  CHECK(activation == "gelu", "there is no activation '", activation, "'");
  return variant == "tanh" ? gelu_tanh : gelu;
}

Tensor activate(const Tensor& x, std::string_view activation, std::string_view variant) {
  check_strided(x, "activations", std::max<int64_t>(1, x.dim()));
  // Strided rows, as in slices of a wider tensor, are read in place.
  bool in_place = x.dim() > 0 && x.stride(-1) == 1;
  for (int64_t dim = 0; dim + 2 < x.dim(); ++dim) in_place &= x.size(dim) == 1;
  const Tensor rows = in_place ? x : x.contiguous();
  Tensor output = empty(x.sizes(), x.scalar_type());
  const Activation function = find_activation(activation, variant);
  CHECK(function, "there is nothing to compute");
  if (x.scalar_type() == kFloat) {
    activate_rows<float>(rows, output, function);
  } else {
    CHECK(x.scalar_type() == kBFloat16, "activations must be float32 or bfloat16");
    activate_rows<bfloat16>(rows, output, function);
  }
  return output;
}

}  // namespace inflight
