// A row's products with `down` are dot products, its products with `up` sums over the rank in ascending order, on any
// thread and beside any rows. Both matrices are read in memory order, with prefetch: each is read once a step, so
// reading them is most of the work.
#include "adapters.h"

#include <array>

#include "checks.h"
#include "convert.h"
#include "linear.h"
#include "parallel.h"

namespace inflight {
namespace {

constexpr int kOutputVectors = kPanelOutputs / kLanes;
constexpr int64_t kStep = 32;  // inputs
constexpr int kDots = 8;       // computed together
constexpr int64_t kAhead = 4096;  // bytes

// Dot products of a row with rows of a matrix, of float32 or bfloat16, in steps of `kStep` elements.
template <class Value>
struct Dot {
  static Floats add(Floats sum, const Value* a, const Value* b) {
    for (int64_t i = 0; i < kStep; i += kLanes) sum = fused(load_floats(a + i), load_floats(b + i), sum);
    return sum;
  }
};

#ifdef __AVX512BF16__

template <>
struct Dot<bfloat16> {
  static Floats add(Floats sum, const bfloat16* a, const bfloat16* b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
  }
};

#endif

// Prefetches `kAhead` bytes ahead.
template <int64_t kBytes>
void read_ahead(const void* at) {
  for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(static_cast<const char*>(at) + kAhead + line);
}

template <class Value, int kCount>
void add_dots(const Value* x, int64_t size, const Value* matrix, float* to) {
  Floats sums[kCount] = {};
  for (int64_t i = 0; i < size; i += kStep)
    for (int row = 0; row < kCount; ++row, matrix += kStep) {
      read_ahead<kStep * sizeof(Value)>(matrix);
      sums[row] = Dot<Value>::add(sums[row], x + i, matrix);
    }
  for (int row = 0; row < kCount; ++row) to[row] = sum_of_lanes(sums[row]);
}

// `matrix * x`, for a matrix `[rank, size]` in the order of `LowRank::down`; the size is a multiple of `kStep`.
template <class Value>
void multiply_down(const Value* x, int64_t size, const Value* matrix, int64_t rank, float* to) {
  int64_t row = 0;
  for (; row + kDots <= rank; row += kDots) add_dots<Value, kDots>(x, size, matrix + row * size, to + row);
  for (; row < rank; ++row) add_dots<Value, 1>(x, size, matrix + row * size, to + row);
}

inline void load_pack(const float* from, std::array<Floats, 1>& to) { to[0] = load<Floats>(from); }
inline void load_pack(const bfloat16* from, std::array<Floats, 2>& to) {
  const Bits bits = load<Bits>(from);
  to = {(Floats)(bits << 16), (Floats)(bits & 0xffff0000)};
}

// Adds `up * inner` to `to`, which has room for whole panels.
template <class Value>
void add_up(const LowRank& matrices, const float* inner, float* to) {
  constexpr int64_t kPack = sizeof(float) / sizeof(Value);
  const int64_t num_panels = matrices.up.size(0), steps = matrices.up.size(1);
  const Value* panel = matrices.up.const_data_ptr<Value>();
  for (int64_t number = 0; number < num_panels; ++number, to += kPanelOutputs) {
    Floats sums[kOutputVectors];
    for (int v = 0; v < kOutputVectors; ++v) sums[v] = load<Floats>(to + v * kLanes);
    for (int64_t step = 0; step < steps; ++step, panel += kPanelOutputs * kPack) {
      read_ahead<kPanelOutputs * sizeof(float)>(panel);
      for (int v = 0; v < kOutputVectors; ++v) {
        std::array<Floats, kPack> weights;
        load_pack(panel + v * kLanes * kPack, weights);
        for (int64_t i = 0; i < kPack; ++i)
          sums[v] = fused(weights[i], broadcast(inner[step * kPack + i]), sums[v]);
      }
    }
    for (int v = 0; v < kOutputVectors; ++v) store(to + v * kLanes, sums[v]);
  }
}

// A thread's reused memory.
template <class Value, int kWhich>
Value* scratch(int64_t size) {
  thread_local AlignedVector<Value> memory;
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// The update of a layer's outputs for a row of `x`.
template <class Value>
void add_row(const std::vector<LowRank>& matrices, const Value* x, int64_t size, float* to) {
  const int64_t whole = round_up(size, kStep);
  const Value* row = x;
  if (whole > size) {
    Value* copy = scratch<Value, 0>(whole);
    std::copy_n(x, size, copy);
    std::fill(copy + size, copy + whole, Value(0));
    row = copy;
  }
  for (const LowRank& each : matrices) {
    float* inner = scratch<float, 1>(each.rank());
    std::fill_n(inner, each.rank(), 0.f);
    multiply_down(row, whole, each.down.const_data_ptr<Value>(), each.down.size(0), inner);
    add_up<Value>(each, inner, to + each.first_output);
  }
}

void check(const LowRank& matrices) {
  const auto dtype = matrices.up.scalar_type();
  const int64_t pack = dtype == kFloat ? 1 : 2;
  check_whole(matrices.down, "a matrix of an adapter", 2, dtype);
  check_whole(matrices.up, "panels of an adapter", 4, dtype);
  check_size(matrices.up, "panels of an adapter", 0, (matrices.num_outputs + kPanelOutputs - 1) / kPanelOutputs);
  check_size(matrices.up, "panels of an adapter", 2, kPanelOutputs);
  check_size(matrices.up, "panels of an adapter", 3, pack);
  CHECK(matrices.first_output >= 0 && matrices.num_outputs > 0, "an adapter must have outputs");
}

}  // namespace

void check(const Adapter& adapter) {
  for (const auto& place : adapter.places)
    for (const LowRank& matrices : place) with_dtype(matrices.up, [&](auto) { check(matrices); });
}

const int32_t* AdapterPlace::of_rows(int64_t num_rows) const {
  if (step->adapters.empty()) return nullptr;
  const auto& rows = reads_logit_rows ? step->of_logits : step->of_tokens;
  const int64_t num_copies = num_rows - (int64_t(rows.size()) - step->kMostCopies);
  CHECK(num_copies >= 0 && num_copies <= step->kMostCopies, "a layer with adapters has ", num_rows,
              " rows, not the step's ", rows.size() - step->kMostCopies);
  return rows.data();
}

Additions::Additions(const Linear& linear, const Tensor& x, const int32_t* adapter_of_row) {
  if (!adapter_of_row || !linear.adapters) return;  // some experts may have no place
  const auto& adapters = linear.adapters->step->adapters;
  const auto matrices_of = [&](int64_t row) -> const std::vector<LowRank>& {
    return adapters.at(adapter_of_row[row])->places.at(linear.adapters->number);
  };
  const int64_t num_rows = x.numel() / linear.in_features, stride = round_up(linear.out_features, kPanelOutputs) + kPanelOutputs;
  std::vector<int64_t> adapted;
  for (int64_t row = 0; row < num_rows; ++row)
    if (adapter_of_row[row] >= 0 && !matrices_of(row).empty()) adapted.push_back(row);
  if (adapted.empty()) return;
  float* sums = scratch<float, 2>(int64_t(adapted.size()) * stride);
  rows_.resize(num_rows);
  for (size_t i = 0; i < adapted.size(); ++i) rows_[adapted[i]] = sums + int64_t(i) * stride;
  const Tensor rows = x.contiguous();
  with_dtype(rows, [&]<class Value>(Value) {
    const Value* from = rows.const_data_ptr<Value>();
    for_each_range(int64_t(adapted.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const std::vector<LowRank>& matrices = matrices_of(adapted[i]);
        for (const LowRank& each : matrices) {
          CHECK(each.up.scalar_type() == rows.scalar_type(), "an adapter of ", each.up.scalar_type(),
                      " cannot take rows of ", rows.scalar_type());
          check_size(each.down, "a matrix of an adapter", 1, round_up(linear.in_features, kStep));
          CHECK(each.down.size(0) <= each.rank() && each.first_output <= linear.out_features - each.num_outputs,
                      "an adapter's matrices do not fit");
        }
        std::fill_n(sums + i * stride, stride, 0.f);
        add_row(matrices, from + adapted[i] * linear.in_features, linear.in_features, sums + i * stride);
      }
    });
  });
}

Tensor adapted_rows(const Tensor& rows, const Tensor& ids, const AdapterPlace& place) {
  check_rows(rows, "embeddings");
  check_whole(ids, "token ids", 1, kLong);
  const int64_t num_rows = rows.size(0), size = rows.size(1);
  check_size(ids, "token ids", 0, num_rows);
  Tensor output = rows.clone();
  const int32_t* adapter_of_row = place.of_rows(num_rows);
  if (!adapter_of_row) return output;
  with_dtype(output, [&]<class Value>(Value) {
    Value* to = output.data_ptr<Value>();
    std::vector<float> sums(round_up(size, kPanelOutputs)), inner;
    for (int64_t row = 0; row < num_rows; ++row) {
      if (adapter_of_row[row] < 0) continue;
      for (const LowRank& each : place.step->adapters.at(adapter_of_row[row])->places.at(place.number)) {
        const int64_t id = ids.const_data_ptr<int64_t>()[row], rank = each.down.size(1);
        CHECK(each.down.scalar_type() == rows.scalar_type(), "an adapter of ", each.down.scalar_type(),
                    " cannot take rows of ", rows.scalar_type());
        CHECK(id >= 0 && id < each.down.size(0), "an adapter has no embedding of token ", id);
        CHECK(each.first_output == 0 && each.num_outputs == size && rank <= each.rank(),
                    "an adapter's embeddings have another size");
        inner.assign(each.rank(), 0.f);
        read_floats(each.down.const_data_ptr<Value>() + id * rank, rank, inner.data());
        std::fill(sums.begin(), sums.end(), 0.f);
        add_up<Value>(each, inner.data(), sums.data());
        for (int64_t i = 0; i < size; ++i) store_float(float(to[row * size + i]) + sums[i], to + row * size + i);
      }
    }
  });
  return output;
}

}  // namespace inflight
