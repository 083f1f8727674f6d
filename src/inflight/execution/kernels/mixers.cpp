#include "mixers.h"

#include <algorithm>
#include <cmath>

#include "activate.h"
#include "aligned.h"
#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

constexpr int64_t kMostTaps = 16;  // of a convolution
constexpr int64_t kChannelsAtOnce = 256, kGroups = kChannelsAtOnce / kLanes;
constexpr int64_t kTokensAtOnce = 32;  // whose queries and keys of a head are prepared together
constexpr int kVectors = kStateColumns / kLanes;
// Sums in turn, so that each addition need not wait for the one before.
constexpr int kSums = kVectors <= 2 ? 4 : kVectors <= 4 ? 2 : 1;

bool is_number(const Tensor& tensor) { return tensor.scalar_type() == kFloat || tensor.scalar_type() == kBFloat16; }

// The step, if it fits the mixer's states and these rows.
std::shared_ptr<const MixerStep> step_of(const Mixer& mixer, int64_t num_rows) {
  const auto step = mixer.step->get();
  CHECK(step->last_state < mixer.states.size(0), "the step names a state beyond the ", mixer.states.size(0));
  CHECK(step->num_rows <= num_rows, "the step has ", step->num_rows, " tokens, and there are ", num_rows, " rows");
  return step;
}

// Zeros in rows of no span.
void clear_others(const Tensor& output, int64_t num_rows) {
  const Tensor others = output.narrow(num_rows, output.size(0) - num_rows);
  if (others.numel()) std::memset(others.data_ptr(), 0, others.nbytes());
}

// ------------------------------------------------------------------------------------------------ convolutions

template <class Value>
Floats load_some(const Value* from, int64_t count) {
  if (count == kLanes) return load_floats(from);
  float lanes[kLanes] = {};
  read_floats(from, count, lanes);
  return load<Floats>(lanes);
}

template <class Value>
void store_some(Floats values, Value* to, int64_t count) {
  if (count == kLanes) return store_floats(values, to);
  float lanes[kLanes];
  store(lanes, values);
  for (int64_t lane = 0; lane < count; ++lane) store_float(lanes[lane], to + lane);
}

Floats rounded_to(Floats values, float) { return values; }
Floats rounded_to(Floats values, bfloat16) { return (Floats)(bfloat16_of(values) << 16); }

template <class Value>
class Convolution {
 public:
  Convolution(const Tensor& states, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              Activation activation, const Tensor& output)
      : states_(states.data_ptr<float>()),
        x_(x.data_ptr<Value>()),
        weight_(weight.data_ptr<Value>()),
        bias_(bias ? bias->data_ptr<Value>() : nullptr),
        output_(output.data_ptr<Value>()),
        stride_(x.stride(0)),
        channels_(x.size(1)),
        taps_(weight.size(1)),
        activation_(activation) {}

  // `count` channels, at most kChannelsAtOnce.
  void run(const MixerStep& step, int64_t channel, int64_t count) const {
    const int64_t num_groups = (count + kLanes - 1) / kLanes;
    Floats weights[kMostTaps][kGroups], biases[kGroups], before[kMostTaps][kGroups];  // of the last taps
    const auto size = [&](int64_t group) { return std::min<int64_t>(kLanes, count - group * kLanes); };
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t first = channel + group * kLanes;
      for (int64_t tap = 0; tap < taps_; ++tap) {
        float lanes[kLanes] = {};
        for (int64_t lane = 0; lane < size(group); ++lane) lanes[lane] = float(weight_[(first + lane) * taps_ + tap]);
        weights[tap][group] = load<Floats>(lanes);
      }
      biases[group] = bias_ ? load_some(bias_ + first, size(group)) : Floats{};
    }
    int64_t oldest = 0;  // the place of the first tap in `before`, a ring
    for (const MixedSpan& span : step.spans) {
      if (span.from != kFromSpanBefore) {
        oldest = 0;
        for (int64_t tap = 0; tap + 1 < taps_; ++tap)
          for (int64_t group = 0; group < num_groups; ++group)
            before[tap][group] =
                span.from < 0 ? Floats{} : load_some(state(span.from, tap) + channel + group * kLanes, size(group));
      }
      for (int64_t row = span.row; row < span.end; ++row) {
        const int64_t newest = (oldest + taps_ - 1) % taps_;
        for (int64_t group = 0; group < num_groups; ++group) {
          const int64_t first = channel + group * kLanes;
          before[newest][group] = load_some(x_ + row * stride_ + first, size(group));
          Floats sum = before[oldest][group] * weights[0][group];
          for (int64_t tap = 1, place = oldest; tap < taps_; ++tap) {
            place = place + 1 == taps_ ? 0 : place + 1;
            sum = fused(before[place][group], weights[tap][group], sum);
          }
          if (bias_) sum += biases[group];
          if (activation_) sum = activation_(rounded_to(sum, Value()));
          store_some(sum, output_ + row * channels_ + first, size(group));
        }
        oldest = (oldest + 1) % taps_;
      }
      if (span.to != kDropped)
        for (int64_t tap = 0; tap + 1 < taps_; ++tap)
          for (int64_t group = 0; group < num_groups; ++group)
            store_some(before[(oldest + tap) % taps_][group], state(span.to, tap) + channel + group * kLanes, size(group));
    }
  }

 private:
  float* state(int64_t number, int64_t tap) const { return states_ + (number * (taps_ - 1) + tap) * channels_; }

  float* states_;
  const Value *x_, *weight_, *bias_;
  Value* output_;
  const int64_t stride_, channels_, taps_;
  const Activation activation_;
};

template <class Value>
void convolve_all(const Mixer& mixer, const MixerStep& step, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, Activation activation, const Tensor& output) {
  const Convolution<Value> convolution(mixer.states, x, weight, bias, activation, output);
  const int64_t num_channels = x.size(1);
  for_each_item((num_channels + kChannelsAtOnce - 1) / kChannelsAtOnce, [&](int64_t i) {
    convolution.run(step, i * kChannelsAtOnce, std::min(kChannelsAtOnce, num_channels - i * kChannelsAtOnce));
  });
}

// ------------------------------------------------------------------------------------------------ recurrences

enum class Decay { kOfHead, kOfKey, kOfElement };

// Some tokens of a head, as floats.
struct Tokens {
  AlignedVector<float> queries, keys, decays, decayed_keys;  // `[tokens, K]`; of a head's decay `[tokens]`
  float factors[kTokensAtOnce];  // beta
  AlignedVector<float> values, outputs;  // `[tokens, 32]`, of some columns
  AlignedVector<float> rates;  // `[K, 32]`, likewise
};

struct Sums {
  Floats of[kSums][kVectors] = {};

  void total(Floats (&to)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v) {
      to[v] = of[0][v];
      for (int i = 1; i < kSums; ++i) to[v] += of[i][v];
    }
  }
};

// Calls function(row, sum) for all rows of a state, with the sums in turn.
template <class Function>
inline void for_each_row(int64_t num_rows, const Function& function) {
  int64_t row = 0;
  for (; row + kSums <= num_rows; row += kSums)
    for (int sum = 0; sum < kSums; ++sum) function(row + sum, sum);
  for (int sum = 0; row < num_rows; ++row, ++sum) function(row, sum);
}

// Advances 32 columns of a state, `[K, 32]`, over some tokens.
template <Decay kDecay, bool kIsDelta>
void advance(float* state, int64_t num_rows, int64_t num_tokens, const float* rates, Tokens& tokens) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float *query = &tokens.queries[token * num_rows], *key = &tokens.keys[token * num_rows];
    const float* decays = kDecay == Decay::kOfKey ? &tokens.decays[token * num_rows]
                          : kDecay == Decay::kOfHead ? &tokens.decays[token] : &tokens.decays[token * kStateColumns];
    Floats update[kVectors], element_decays[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) update[v] = load<Floats>(&tokens.values[token * kStateColumns + v * kLanes]);
    if constexpr (kDecay == Decay::kOfElement)
      for (int v = 0; v < kVectors; ++v) element_decays[v] = load<Floats>(decays + v * kLanes);
    if constexpr (kIsDelta) {
      const float* read = kDecay == Decay::kOfKey ? &tokens.decayed_keys[token * num_rows] : key;
      Sums sums;
      for_each_row(num_rows, [&](int64_t row, int sum) __attribute__((always_inline)) {
        const Floats factor = broadcast(read[row]);
        for (int v = 0; v < kVectors; ++v)
          sums.of[sum][v] = fused(load<Floats>(state + row * kStateColumns + v * kLanes), factor, sums.of[sum][v]);
      });
      Floats known[kVectors];
      sums.total(known);
      for (int v = 0; v < kVectors; ++v)
        update[v] -= kDecay == Decay::kOfHead ? known[v] * broadcast(decays[0]) : known[v];
    }
    for (int v = 0; v < kVectors; ++v) update[v] *= broadcast(tokens.factors[token]);
    const Floats decay_of_head = broadcast(decays[0]);
    Sums sums;
    for_each_row(num_rows, [&](int64_t row, int sum) __attribute__((always_inline)) {
      const Floats key_of_row = broadcast(key[row]), query_of_row = broadcast(query[row]);
      for (int v = 0; v < kVectors; ++v) {
        float* place = state + row * kStateColumns + v * kLanes;
        Floats decay = decay_of_head;
        if constexpr (kDecay == Decay::kOfElement)
          decay = exp(element_decays[v] * load<Floats>(rates + row * kStateColumns + v * kLanes));
        if constexpr (kDecay == Decay::kOfKey) decay = broadcast(decays[row]);
        const Floats next = fused(update[v], key_of_row, load<Floats>(place) * decay);
        store(place, next);
        sums.of[sum][v] = fused(next, query_of_row, sums.of[sum][v]);
      }
    });
    Floats output[kVectors];
    sums.total(output);
    for (int v = 0; v < kVectors; ++v) store(&tokens.outputs[token * kStateColumns + v * kLanes], output[v]);
  }
}

using Advance = void (*)(float*, int64_t, int64_t, const float*, Tokens&);

Advance find_advance(Decay decay, bool is_delta) {
  if (decay == Decay::kOfElement) return advance<Decay::kOfElement, false>;
  if (decay == Decay::kOfKey) return is_delta ? advance<Decay::kOfKey, true> : advance<Decay::kOfKey, false>;
  return is_delta ? advance<Decay::kOfHead, true> : advance<Decay::kOfHead, false>;
}

void read(const Tensor& tensor, int64_t row, int64_t head, int64_t first, int64_t count, float* to) {
  const int64_t place = row * tensor.stride(0) + head * tensor.stride(1) + first;
  if (tensor.scalar_type() == kFloat) read_floats(tensor.const_data_ptr<float>() + place, count, to);
  else read_floats(tensor.const_data_ptr<bfloat16>() + place, count, to);
}

float sum_of_squares(const float* values, int64_t count) {
  Floats sums{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums = fused(load<Floats>(values + i), load<Floats>(values + i), sums);
  float sum = sum_of_lanes(sums);
  for (; i < count; ++i) sum += values[i] * values[i];
  return sum;
}

// The last dimension side by side.
Tensor with_whole_vectors(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

class Heads {
 public:
  Heads(const Mixer& mixer, const MixerStep& step, const Recurrence& given, const Tensor& output)
      : step_(step),
        query_(with_whole_vectors(given.query)),
        key_(with_whole_vectors(given.key)),
        value_(with_whole_vectors(given.value)),
        decay_(with_whole_vectors(given.decay)),
        output_(output),
        given_(given),
        states_(mixer.states.data_ptr<float>()),
        num_rows_(key_.size(2)),
        num_columns_(value_.size(2)),
        num_heads_(value_.size(1)),
        num_parts_((num_columns_ + kStateColumns - 1) / kStateColumns),
        decay_kind_(given.rates ? Decay::kOfElement : decay_.dim() == 3 ? Decay::kOfKey : Decay::kOfHead),
        advance_(find_advance(decay_kind_, given.is_delta)) {}

  // One head of a chain of spans.
  void run(int64_t chain, int64_t head) const {
    thread_local Tokens tokens;
    thread_local AlignedVector<float> dropped;
    const size_t first = step_.chains[chain];
    const size_t end = size_t(chain) + 1 < step_.chains.size() ? step_.chains[chain + 1] : step_.spans.size();
    const int64_t size = num_parts_ * num_rows_ * kStateColumns;
    dropped.resize(size);
    float* before = nullptr;
    for (size_t i = first; i < end; ++i) {
      const MixedSpan& span = step_.spans[i];
      float* state = span.to == kDropped ? dropped.data() : of(span.to, head);
      const float* from = span.from == kFromSpanBefore ? before : span.from < 0 ? nullptr : of(span.from, head);
      if (from == nullptr) std::memset(state, 0, size * sizeof(float));
      else if (from != state) std::memcpy(state, from, size * sizeof(float));
      for (int64_t row = span.row; row < span.end; row += kTokensAtOnce)
        run_tokens(state, head, row, std::min(kTokensAtOnce, span.end - row), tokens);
      before = state;
    }
  }

  int64_t num_heads() const { return num_heads_; }

 private:
  float* of(int64_t state, int64_t head) const {
    return states_ + (state * num_heads_ + head) * num_parts_ * num_rows_ * kStateColumns;
  }

  void run_tokens(float* state, int64_t head, int64_t first, int64_t count, Tokens& tokens) const {
    prepare(head, first, count, tokens);
    for (int64_t part = 0; part < num_parts_; ++part) {
      const int64_t column = part * kStateColumns, columns = std::min(kStateColumns, num_columns_ - column);
      tokens.values.assign(count * kStateColumns, 0), tokens.outputs.resize(count * kStateColumns);
      for (int64_t i = 0; i < count; ++i) read(value_, first + i, head, column, columns, &tokens.values[i * kStateColumns]);
      const float* rates = nullptr;
      if (decay_kind_ == Decay::kOfElement) {
        tokens.decays.assign(count * kStateColumns, 0);
        for (int64_t i = 0; i < count; ++i)
          read(decay_, first + i, head, column, columns, &tokens.decays[i * kStateColumns]);
        tokens.rates.assign(num_rows_ * kStateColumns, 0);
        for (int64_t row = 0; row < num_rows_; ++row)
          read(*given_.rates, head, row, column, columns, &tokens.rates[row * kStateColumns]);
        rates = tokens.rates.data();
      }
      advance_(state + part * num_rows_ * kStateColumns, num_rows_, count, rates, tokens);
      const float skip = given_.skip ? given_.skip->data_ptr<float>()[head] : 0;
      for (int64_t i = 0; i < count; ++i) {
        float *values = &tokens.values[i * kStateColumns], *outputs = &tokens.outputs[i * kStateColumns];
        if (given_.skip)
          for (int64_t j = 0; j < columns; ++j) outputs[j] += skip * values[j];
        const int64_t place = ((first + i) * num_heads_ + head) * num_columns_ + column;
        if (output_.scalar_type() == kFloat) std::copy_n(outputs, columns, output_.data_ptr<float>() + place);
        else for (int64_t j = 0; j < columns; ++j) store_float(outputs[j], output_.data_ptr<bfloat16>() + place + j);
      }
    }
  }

  void prepare(int64_t head, int64_t first, int64_t count, Tokens& tokens) const {
    const int64_t key_head = head * key_.size(1) / num_heads_;
    tokens.queries.resize(count * num_rows_), tokens.keys.resize(count * num_rows_);
    for (int64_t i = 0; i < count; ++i) {
      float *query = &tokens.queries[i * num_rows_], *key = &tokens.keys[i * num_rows_];
      read(query_, first + i, key_head, 0, num_rows_, query);
      read(key_, first + i, key_head, 0, num_rows_, key);
      float query_factor = given_.scale, key_factor = 1;
      if (given_.normalizes) {
        query_factor /= std::sqrt(sum_of_squares(query, num_rows_) + 1e-6f);
        key_factor /= std::sqrt(sum_of_squares(key, num_rows_) + 1e-6f);
      }
      for (int64_t j = 0; j < num_rows_; ++j) query[j] *= query_factor, key[j] *= key_factor;
      tokens.factors[i] = given_.beta ? given_.beta->data_ptr<float>()[(first + i) * num_heads_ + head] : 1;
    }
    if (decay_kind_ == Decay::kOfElement) return;
    const int64_t each = decay_kind_ == Decay::kOfKey ? num_rows_ : 1;
    tokens.decays.resize(round_up(count * each, kLanes));
    for (int64_t i = 0; i < count; ++i) {
      if (each == 1) tokens.decays[i] = decay_.const_data_ptr<float>()[(first + i) * decay_.stride(0) + head];
      else read(decay_, first + i, head, 0, each, &tokens.decays[i * each]);
    }
    for (size_t i = 0; i < tokens.decays.size(); i += kLanes)
      store(&tokens.decays[i], exp(load<Floats>(&tokens.decays[i])));
    if (each == 1 || !given_.is_delta) return;
    tokens.decayed_keys.resize(count * num_rows_);
    for (int64_t i = 0; i < count * num_rows_; ++i) tokens.decayed_keys[i] = tokens.keys[i] * tokens.decays[i];
  }

  const MixerStep& step_;
  const Tensor query_, key_, value_, decay_;
  const Tensor& output_;
  const Recurrence& given_;
  float* states_;
  const int64_t num_rows_, num_columns_, num_heads_, num_parts_;
  const Decay decay_kind_;
  const Advance advance_;
};

void check(const Mixer& mixer, const Recurrence& given) {
  for (const auto& [tensor, name] : {std::pair{&given.query, "queries"}, {&given.key, "keys"}, {&given.value, "values"}}) {
    check_strided(*tensor, name, 3);
    CHECK(is_number(*tensor), name, " must be float32 or bfloat16");
    check_size(*tensor, name, 0, given.value.size(0));
  }
  const int64_t num_tokens = given.value.size(0), num_heads = given.value.size(1), num_columns = given.value.size(2);
  const int64_t num_key_heads = given.key.size(1), num_rows = given.key.size(2);
  CHECK(num_key_heads > 0 && num_heads % num_key_heads == 0 && num_rows > 0 && num_columns > 0,
        "the heads of values must be a multiple of those of keys");
  check_size(given.query, "queries", 1, num_key_heads);
  check_size(given.query, "queries", 2, num_rows);
  check_strided(given.decay, "decays", given.decay.dim() == 3 ? 3 : 2);
  CHECK(given.decay.scalar_type() == kFloat, "decays must be float32");
  check_size(given.decay, "decays", 0, num_tokens);
  check_size(given.decay, "decays", 1, num_heads);
  if (given.decay.dim() == 3) check_size(given.decay, "decays", 2, given.rates ? num_columns : num_rows);
  if (given.beta) {
    check_whole(*given.beta, "betas", 2, kFloat);
    check_size(*given.beta, "betas", 0, num_tokens);
    check_size(*given.beta, "betas", 1, num_heads);
  }
  if (given.skip) {
    check_whole(*given.skip, "skips", 1, kFloat);
    check_size(*given.skip, "skips", 0, num_heads);
  }
  if (given.rates) {
    CHECK(!given.is_delta && given.decay.dim() == 3, "a delta rule has no rates");
    check_whole(*given.rates, "rates", 3, kFloat);
    check_size(*given.rates, "rates", 0, num_heads);
    check_size(*given.rates, "rates", 1, num_rows);
    check_size(*given.rates, "rates", 2, num_columns);
  }
  const int64_t size = num_heads * round_up(num_columns, kStateColumns) * num_rows;
  check_whole(mixer.states, "states", 2, kFloat);
  check_size(mixer.states, "states", 1, size);
}

}  // namespace

void begin_mixing(Current<MixerStep>& current, const Tensor& spans) {
  check_whole(spans, "spans", 2, kLong);
  check_size(spans, "spans", 1, 4);
  const auto step = std::make_shared<MixerStep>();
  const int64_t* number = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < spans.size(0); ++i, number += 4) {
    const MixedSpan span{number[0], number[1], number[2], number[3]};
    CHECK(span.row == step->num_rows && span.row <= span.end && span.from >= kFromSpanBefore && span.to >= kDropped,
          "a span of a step is wrong");
    CHECK(span.from != kFromSpanBefore || i > 0, "there is no span before the first");
    if (span.from != kFromSpanBefore) step->chains.push_back(i);
    step->num_rows = span.end;
    step->last_state = std::max({step->last_state, span.from, span.to});
    step->spans.push_back(span);
  }
  current.set(step);
}

Tensor convolve(const Mixer& mixer, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                std::string_view activation) {
  check_strided(x, "rows", 2);
  CHECK(is_number(x), "rows must be float32 or bfloat16");
  check_whole(weight, "weights", 2, x.scalar_type());
  check_size(weight, "weights", 0, x.size(1));
  CHECK(weight.size(1) >= 2 && weight.size(1) <= kMostTaps, "a convolution of ", weight.size(1), " rows is not supported");
  if (bias) {
    check_whole(*bias, "the bias", 1, x.scalar_type());
    check_size(*bias, "the bias", 0, x.size(1));
  }
  check_whole(mixer.states, "states", 2, kFloat);
  check_size(mixer.states, "states", 1, (weight.size(1) - 1) * x.size(1));
  const auto step = step_of(mixer, x.size(0));
  const Tensor rows = with_whole_vectors(x), output = empty({x.size(0), x.size(1)}, x.scalar_type());
  clear_others(output, step->num_rows);
  const Activation function = find_activation(activation, "none");
  if (x.scalar_type() == kFloat) convolve_all<float>(mixer, *step, rows, weight, bias, function, output);
  else convolve_all<bfloat16>(mixer, *step, rows, weight, bias, function, output);
  return output;
}

Tensor recur(const Mixer& mixer, const Recurrence& given, ScalarType dtype) {
  check(mixer, given);
  CHECK(dtype == kFloat || dtype == kBFloat16, "results must be float32 or bfloat16");
  const auto step = step_of(mixer, given.value.size(0));
  const Tensor output = empty(given.value.sizes(), dtype);
  clear_others(output, step->num_rows);
  const Heads heads(mixer, *step, given, output);
  for_each_item(int64_t(step->chains.size()) * heads.num_heads(),
                [&](int64_t i) { heads.run(i / heads.num_heads(), i % heads.num_heads()); });
  return output;
}

}  // namespace inflight
