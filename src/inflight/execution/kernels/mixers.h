// Sequence mixers: causal convolutions and linear recurrences over a step's spans, with a state for each sequence. A
// token's result has the same bits in any batch and chunking: states advance token by token, in float32.
#pragma once

#include "tensor.h"

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "current.h"

namespace inflight {

constexpr int64_t kFromZeros = -1, kFromSpanBefore = -2, kDropped = -1;

// Rows [row, end) of the step, which advance the state `from` (its index, or one of the above) to the state `to`.
struct MixedSpan {
  int64_t row, end, from, to;
};

struct MixerStep {
  int64_t num_rows = 0, last_state = -1;
  std::vector<MixedSpan> spans;
  std::vector<int64_t> chains;  // the first span of each run of spans that begin where the one before ended
};

struct Mixer {
  Tensor states;  // float32, `[states, …]`: see `convolve` and `recur`
  std::shared_ptr<Current<MixerStep>> step;
};

// The next step's spans, `[n, 4]` int64, in order: see `MixedSpan`.
void begin_mixing(Current<MixerStep>& step, const Tensor& spans);

// Each channel's last rows times its weights: `x` is `[T, C]`, `weight` `[C, K]` and `bias` `[C]`, all of one dtype,
// float32 or bfloat16; returns `[T, C]`. A state is `[K - 1, C]`, the last rows, oldest first.
Tensor convolve(const Mixer& mixer, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                std::string_view activation);

// Columns of a state that are computed together; a state `[K, V]` of a head is `[ceil(V / 32), K, 32]` in memory.
constexpr int64_t kStateColumns = 32;

struct Recurrence {
  const Tensor &query, &key, &value, &decay;
  const std::optional<Tensor>&beta, &skip, &rates;
  bool is_delta, normalizes;
  float scale;
};

// `S = decay * S + key (beta * (value - key S))` (without `- key S`, unless it is a delta rule), and `query S + skip *
// value`, token by token, for each head's state S, `[K, V]`. `query` and `key` are `[T, Hk, K]`, `value` `[T, H, V]`, of
// float32 or bfloat16; heads `i * H / Hk …` share a key. The others are float32: `decay`, the logarithm, is `[T, H]` or
// `[T, H, K]`; or, with `rates` `[H, K, V]`, `[T, H, V]` and a factor of these. `beta` is `[T, H]`, `skip` `[H]`. If
// asked, queries and keys are normalised to length 1; then queries are scaled. Returns `[T, H, V]` of `dtype`.
Tensor recur(const Mixer& mixer, const Recurrence& given, ScalarType dtype);

}  // namespace inflight
