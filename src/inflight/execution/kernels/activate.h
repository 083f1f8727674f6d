// Elementwise activations, with the same bits at any place in a row, on any thread.
#pragma once

#include "tensor.h"

#include <string_view>

#include "vectors.h"

namespace inflight {

using Activation = Floats (*)(Floats);
Floats relu(Floats x);
Floats swish(Floats x);
Floats gelu(Floats x);
Floats gelu_tanh(Floats x);
Floats sigmoid(Floats x);
Floats softplus(Floats x);

// nullptr for "none".
Activation find_activation(std::string_view activation, std::string_view variant);

// "relu", "swish", "sigmoid", "softplus", "exp", or "gelu" with the variant "none" or "tanh", of float32 or bfloat16.
Tensor activate(const Tensor& x, std::string_view activation, std::string_view variant);

}  // namespace inflight
