#include "attention.h"

#include <string_view>
#include <unordered_map>

#include "aligned.h"
#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

// Tiles of spans up to this many tokens are computed separately: by several threads, and once for all spans that share
// them.
constexpr int64_t kShortSpan = 16;
// Rows (one query head of one token each) computed together per tile, so that it is read once; and items per thread.
constexpr int64_t kMaxRowsOfItem = 256, kMinRowsOfItem = 32, kItemsOfThread = 4;
// Most floats of unmerged tile results; further spans run their tiles one by one.
constexpr int64_t kMaxPartialFloats = 1 << 25;
// Larger sizes might overflow.
constexpr int64_t kMaxBlockSize = 1 << 20, kMaxTokens = 1 << 30;

template <class Kind>
Storage<Kind> storage_of(const Call& call) {
  return {static_cast<char*>(call.stored.data_ptr()), StripeLayout<Kind>(call.shape)};
}

// ------------------------------------------------------------------------------------------------ writing

// Rotate `numbers` by a Hadamard matrix, which is its own inverse, in runs of the largest power of two that divides `size`.
// This spreads an outlier over all dimensions, so four bits lose less. (As QuaRot does, arXiv:2404.00456.)
void rotate(float* numbers, int size) {
  thread_local std::vector<float> others;
  others.resize(size);
  const int run = size & -size, half = run / 2;
  float *from = numbers, *to = others.data();
  for (int stage = run; stage > 1; stage /= 2, std::swap(from, to))
    for (int first = 0; first < size; first += run) {
      const float* __restrict in = from + first;
      float* __restrict out = to + first;
      for (int i = 0; i < half; ++i) {  // stages that all look alike are compiled to vectors
        out[2 * i] = in[i] + in[i + half];
        out[2 * i + 1] = in[i] - in[i + half];
      }
    }
  const float factor = 1 / std::sqrt(float(run));
  for (int i = 0; i < size; ++i) numbers[i] = from[i] * factor;
}

// Write a token's vector of one head: number i of it to place(i), counted in numbers. Returns its scale.
template <class Kind, class Input, class Place>
float write_vector(const Input* from, int size, typename Kind::Stored* to, const Place& place) {
  if constexpr (!Kind::kIsScaled) {
    for (int i = 0; i < size; ++i) store_float(float(from[i]), to + place(i));
    return 1;
  } else {
    thread_local std::vector<float> numbers;
    numbers.assign(from, from + size);
    if (std::is_same_v<Kind, Int4>) rotate(numbers.data(), size);
    float largest = 0;
    bool finite = true;
    for (const float number : numbers) largest = std::max(largest, std::abs(number)), finite &= std::isfinite(number);
    if (!finite) return std::numeric_limits<float>::quiet_NaN();
    if constexpr (std::is_same_v<Kind, Int8>) {
      const float inverse = largest > 0 ? 127 / largest : 0;
      for (int i = 0; i < size; ++i) to[place(i)] = int8_t(std::nearbyint(numbers[i] * inverse));
      return largest / 127;
    } else {
      const float inverse = largest > 0 ? 7.5f / largest : 0;
      float product = 0, square = 0;  // the best scale of what is stored is their quotient
      for (int i = 0; i < size; ++i) {
        const int number = int(std::clamp(std::nearbyint(numbers[i] * inverse + 7.5f), 0.f, 15.f));
        const int64_t at = place(i);
        uint8_t& byte = to[at / 2];
        byte = at % 2 ? (byte & 15) | number << 4 : (byte & 240) | number;
        product += numbers[i] * (number - 7.5f), square += (number - 7.5f) * (number - 7.5f);
      }
      return product / square;
    }
  }
}

// Whether values are stored unchanged.
template <class Kind, class Input>
constexpr bool kIsStoredAsGiven = !Kind::kIsScaled && std::is_same_v<Input, std::conditional_t<Kind::kPack == 2, bfloat16, float>>;

// The vectors of kLanes tokens, which lie a stride apart, of one head: all of a stripe, in the order of its memory.
template <class Kind, class Input>
void write_stripe(const Shape& shape, const Input* keys, int64_t key_stride, const Input* values, int64_t value_stride,
                  const Stripe<Kind>& to) {
  using Stored = typename Kind::Stored;
  constexpr int kPack = Kind::kPack;
  struct Pack {
    Stored elements[kPack];
  };
  const int num_steps = shape.head_size / kPack;
  for (int step = 0; step < num_steps; ++step)
    for (int lane = 0; lane < kLanes; ++lane)
      std::memcpy(to.keys + (step * kLanes + lane) * kPack, keys + lane * key_stride + step * kPack, sizeof(Pack));
  if (shape.head_size % kPack)
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < kPack; ++i) {
        const int at = num_steps * kPack + i;
        store_float(at < shape.head_size ? float(keys[lane * key_stride + at]) : 0.f,
                    to.keys + (num_steps * kLanes + lane) * kPack + i);
      }
  const auto* from = reinterpret_cast<const Stored*>(values);
  for (int lane = 0; lane < kLanes; lane += kPack) {
    auto* packs = reinterpret_cast<Pack*>(to.values + lane * shape.value_lanes());
    for (int i = 0; i < shape.value_head_size; ++i)
      for (int each = 0; each < kPack; ++each) packs[i].elements[each] = from[(lane + each) * value_stride + i];
  }
}

template <class Kind, class Input>
void write_rows(const Call& call, const Tensor& cache_indices, const Tensor& key, const Tensor& value) {
  const Shape& shape = call.shape;
  const Storage<Kind> storage = storage_of<Kind>(call);
  const int64_t* indices = cache_indices.data_ptr<int64_t>();
  const int64_t num_rows = std::min(key.size(0), cache_indices.size(0));
  const int64_t num_heads = shape.num_kv_heads, per_block = shape.stripes_per_block();
  const int64_t value_lanes = shape.value_lanes();
  const Input *keys = key.data_ptr<Input>(), *values = value.data_ptr<Input>();
  // Whether a row and those after it are all of a stripe.
  const auto fills_stripe = [&](int64_t row, int64_t offset) {
    if (offset % kLanes || offset + kLanes > shape.block_size || row + kLanes > num_rows) return false;
    for (int lane = 1; lane < kLanes; ++lane)
      if (indices[row + lane] != indices[row] + lane) return false;
    return true;
  };
  const auto write_head = [&](int64_t head) {
    for (int64_t row = 0; row < num_rows; ++row) {
      if (indices[row] < 0) continue;
      const int64_t block = indices[row] / shape.block_size, offset = indices[row] % shape.block_size;
      const auto stripe = storage.stripe((block * num_heads + head) * per_block + offset / kLanes);
      const int64_t lane = offset % kLanes;
      const Input* key_of_row = keys + row * key.stride(0) + head * key.stride(1);
      const Input* from = values + row * value.stride(0) + head * value.stride(1);
      if constexpr (kIsStoredAsGiven<Kind, Input>)
        if (fills_stripe(row, offset)) {
          write_stripe<Kind>(shape, key_of_row, key.stride(0), from, value.stride(0), stripe);
          row += kLanes - 1;
          continue;
        }
      constexpr int kPack = Kind::kPack;
      const auto key_place = [&](int64_t i) { return Kind::place(i / kPack * kLanes + lane, i % kPack); };
      const auto value_place = [&](int64_t i) { return Kind::place(lane / kPack * value_lanes + i, lane % kPack); };
      const float key_scale = write_vector<Kind>(key_of_row, shape.head_size, stripe.keys, key_place);
      const float value_scale = write_vector<Kind>(from, shape.value_head_size, stripe.values, value_place);
      if constexpr (Kind::kIsScaled) {
        stripe.key_scales[lane] = key_scale, stripe.value_scales[lane] = value_scale;
      } else if (shape.head_size % kPack) {
        stripe.keys[key_place(shape.head_size)] = 0;
      }
    }
  };
  if (num_rows * num_heads < 32) {
    for (int64_t head = 0; head < num_heads; ++head) write_head(head);
  } else {
    for_each_item(num_heads, write_head);
  }
}

// ------------------------------------------------------------------------------------------------ attending

// Rows of spans that see one tile; or, if `tile` is negative, rows of one span that see all of its tiles.
struct Item {
  int kv_head;
  int64_t tile;                   // from position 0; negative: all
  int64_t first_span, num_spans;  // in `members_`; with all tiles the number of the span itself, and 1
  int64_t first_row, num_rows;    // with all tiles: of the span, which has a row for each token and query head
};

// Partial results of a short span, whose tiles are computed separately: `[tiles, Hkv, rows]`.
struct Apart {
  int span;
  int64_t first_tile, num_tiles, first_partial;
};

// An attention call of a step, for any dtype of the cache.
class Plan {
 public:
  Plan(const Call& call, const Step& step, const Tensor& query, const float* sinks, const Tensor& output)
      : shape_(call.shape),
        step_(step),
        group_(step_.groups[call.group]),
        query_(query),
        sinks_(sinks),
        output_(output),
        is_float_(query.scalar_type() == kFloat),
        is_rotated_(call.dtype == kByte) {
    plan();
  }

 protected:
  int64_t num_rows(const Span& span) const { return (span.end - span.start) * shape_.group_size(); }
  int64_t first_tile(const Span& span) const { return shape_.first_visible(span.start) / shape_.tile_size(); }
  int64_t last_tile(const Span& span) const { return (span.end - 1) / shape_.tile_size(); }

  // Whether the tokens of a span at positions [first, last] see the whole tile.
  bool sees_whole(const Span& span, int64_t first, int64_t last, int64_t tile) const {
    const int64_t size = shape_.tile_size();
    return shape_.first_visible(last) <= tile * size && (tile + 1) * size <= shape_.end_visible(first, span.end, span.is_item);
  }

  // Rows per item: fewer, if threads would be idle.
  int64_t rows_of_item(int64_t num_rows) const {
    const int64_t enough = kItemsOfThread * thread_count();
    int64_t rows = kMaxRowsOfItem;
    while (rows > kMinRowsOfItem && (num_rows + rows - 1) / rows * shape_.num_kv_heads < enough) rows /= 2;
    return rows;
  }

  Visible visible(const Span& span, int64_t row, int64_t tile) const {
    const int64_t position = span.start + row / shape_.group_size(), first = tile * shape_.tile_size();
    const int64_t low = shape_.first_visible(position) - first;
    const int64_t high = shape_.end_visible(position, span.end, span.is_item) - first;
    return {int(std::clamp<int64_t>(low, 0, shape_.tile_size())), int(std::clamp<int64_t>(high, 0, shape_.tile_size()))};
  }

  const int32_t* blocks(int64_t span, int64_t tile) const {
    return group_.tables.data_ptr<int32_t>() + span * group_.tables.size(1) + tile * shape_.blocks_per_tile();
  }

  Partial& partial(const Apart& apart, int64_t tile, int kv_head, int64_t row) {
    const int64_t rows = num_rows(step_.spans[apart.span]);
    const int64_t place = apart.first_partial + ((tile - apart.first_tile) * shape_.num_kv_heads + kv_head) * rows + row;
    partials_[place].values = partial_values_.data_ptr<float>() + place * shape_.value_lanes();
    return partials_[place];
  }

  // The floats of a token's query for a head.
  void read_query(int64_t token, int64_t head, float* to) const {
    const int64_t place = token * query_.stride(0) + head * query_.stride(1);
    if (is_float_) read_floats(query_.const_data_ptr<float>() + place, shape_.head_size, to);
    else read_floats(query_.const_data_ptr<bfloat16>() + place, shape_.head_size, to);
  }

  void merge_apart(const Apart& apart, int kv_head) {
    const Span& span = step_.spans[apart.span];
    for (int64_t row = 0; row < num_rows(span); ++row) {
      Partial& so_far = partial(apart, apart.first_tile, kv_head, row);
      for (int64_t tile = apart.first_tile + 1; tile < apart.first_tile + apart.num_tiles; ++tile)
        merge(so_far, partial(apart, tile, kv_head, row), shape_.value_lanes());
      finish(span, kv_head, row, so_far);
    }
  }

  // Add the head's sink to the softmax, divide by the sum, rotate back, and store the row.
  void finish(const Span& span, int kv_head, int64_t row, Partial result) const {
    const int64_t token = span.row + row / shape_.group_size();
    const int64_t head = kv_head * shape_.group_size() + row % shape_.group_size();
    float factor = 1 / result.sum;
    if (sinks_) {
      const float maximum = std::max(result.max, sinks_[head]), weight = std::exp(result.max - maximum);
      factor = weight / (result.sum * weight + std::exp(sinks_[head] - maximum));
    }
    if (is_rotated_) rotate(result.values, shape_.value_head_size);
    const int64_t place = (token * shape_.num_heads + head) * shape_.value_head_size;
    const auto write = [&](auto* to) {
      for (int i = 0; i < shape_.value_head_size; ++i) store_float(result.values[i] * factor, to + i);
    };
    if (is_float_) write(output_.data_ptr<float>() + place);
    else write(output_.data_ptr<bfloat16>() + place);
  }

  const Shape& shape_;
  const Step& step_;
  const GroupStep& group_;
  const Tensor& query_;
  const float* sinks_;
  const Tensor& output_;
  const bool is_float_, is_rotated_;
  std::vector<Item> items_;
  std::vector<Apart> apart_;
  std::vector<int64_t> members_;
  std::vector<Partial> partials_;
  Tensor partial_values_;

 private:
  void plan() {
    int64_t num_partials = 0;
    std::unordered_map<int64_t, int64_t> shared;  // (tile, owner) -> place in `groups`
    std::vector<std::pair<int64_t, std::vector<int64_t>>> groups;  // tile, members of apart_
    for (size_t s = 0; s < step_.spans.size(); ++s) {
      const Span& span = step_.spans[s];
      const int64_t first = first_tile(span), num_tiles = last_tile(span) + 1 - first;
      const int64_t size = num_tiles * shape_.num_kv_heads * num_rows(span);
      if (span.end - span.start > kShortSpan || num_tiles == 1 ||
          (num_partials + size) * (shape_.value_lanes() + 2) > kMaxPartialFloats) {
        const int64_t at_once = rows_of_item(num_rows(span));
        for (int64_t row = 0; row < num_rows(span); row += at_once)
          for (int head = 0; head < shape_.num_kv_heads; ++head)
            items_.push_back({head, -1, int64_t(s), 1, row, std::min(at_once, num_rows(span) - row)});
        continue;
      }
      apart_.push_back({int(s), first, num_tiles, num_partials});
      num_partials += size;
      for (int64_t tile = first; tile < first + num_tiles; ++tile) {
        if (sees_whole(span, span.start, span.end - 1, tile)) {
          const int64_t key = (tile << 32) + group_.tile_owners[s][tile];
          const auto [place, is_new] = shared.emplace(key, int64_t(groups.size()));
          if (is_new) groups.push_back({tile, {}});
          groups[place->second].second.push_back(int64_t(apart_.size()) - 1);
        } else {
          groups.push_back({tile, {int64_t(apart_.size()) - 1}});
        }
      }
    }
    for (const auto& [tile, members] : groups) {
      const int64_t first = int64_t(members_.size());
      members_.insert(members_.end(), members.begin(), members.end());
      for (int head = 0; head < shape_.num_kv_heads; ++head)
        items_.push_back({head, tile, first, int64_t(members.size()), 0, 0});
    }
    partials_.resize(num_partials);
    partial_values_ = empty({num_partials, shape_.value_lanes()}, kFloat);
  }
};

template <class Kind>
class Attention : Plan {
  using Operand = typename Kind::Operand;
  using Denormals = typename Products<Kind>::Denormals;

 public:
  Attention(const Call& call, const Step& step, const Tensor& query, const float* sinks, const Tensor& output)
      : Plan(call, step, query, sinks, output),
        storage_(storage_of<Kind>(call)),
        query_stride_(round_up(shape_.head_size, kLanes) / Kind::kPack) {}

  void run() {
    const int64_t num_items = int64_t(items_.size()), num_threads = thread_count();
    for_each_item(num_items, [&](int64_t i) {
      [[maybe_unused]] const Denormals denormals{};
      run_item(items_[i], i + num_threads < num_items ? &items_[i + num_threads] : nullptr);
    });
    if (!apart_.empty())
      for_each_item(int64_t(apart_.size()) * shape_.num_kv_heads, [this](int64_t i) {
        [[maybe_unused]] const Denormals denormals{};
        merge_apart(apart_[i / shape_.num_kv_heads], int(i % shape_.num_kv_heads));
      });
  }

 private:
  struct Thread {
    TileScratch<Kind> tile;
    AlignedVector<float> floats, so_far_values;
    AlignedVector<Operand> queries;
    std::vector<Visible> visible;
    std::vector<Partial> so_far, next;
  };

  // `next` is this thread's probable next item.
  void run_item(const Item& item, const Item* next) {
    thread_local Thread thread;
    if (item.tile < 0) {
      run_all_tiles(item, next, thread);
    } else {
      foresee(next, thread);
      run_tile_apart(item, thread);
    }
  }

  // Prefetch the keys of an item's first tile while the values of the current one are summed.
  void foresee(const Item* item, Thread& thread) const {
    thread.tile.next.clear();
    if (item == nullptr) return;
    const int64_t number = item->tile < 0 ? item->first_span : apart_[members_[item->first_span]].span;
    const Span& span = step_.spans[number];
    const int64_t tile = item->tile < 0 ? first_tile(span) : item->tile;
    foresee(number, tile, item->kv_head, shape_.first_visible(span.start), span.end, thread);
  }

  // The same for a tile of a span of which positions [low, high) are seen.
  void foresee(int64_t span, int64_t tile, int kv_head, int64_t low, int64_t high, Thread& thread) const {
    const int64_t first = tile * shape_.tile_size(), last = first + shape_.tile_size();
    collect_stripes(shape_, storage_, blocks(span, tile), kv_head, int(std::max(low, first) - first),
                    int(std::min(high, last) - first), 1, thread.tile.next);
  }

  // Write the query of a span's row as operands to `to[query_stride_]`.
  void load_query(const Span& span, int kv_head, int64_t row, Thread& thread, Operand* to) const {
    const int64_t token = span.row + row / shape_.group_size();
    const int64_t head = kv_head * shape_.group_size() + row % shape_.group_size();
    if constexpr (std::is_same_v<Operand, int32_t>)
      if (!is_float_ && !is_rotated_ && shape_.head_size % (2 * kLanes) == 0) {
        const auto* from = query_.const_data_ptr<bfloat16>() + token * query_.stride(0) + head * query_.stride(1);
        std::memcpy(to, from, shape_.head_size * sizeof *from);
        return;
      }
    thread.floats.assign(round_up(shape_.head_size, kLanes), 0.f);
    read_query(token, head, thread.floats.data());
    if (is_rotated_) rotate(thread.floats.data(), shape_.head_size);
    for (size_t i = 0; i < thread.floats.size(); i += kLanes, to += kLanes / Kind::kPack)
      Kind::pack(load<Floats>(&thread.floats[i]), to);
  }

  void collect(int64_t span, int64_t tile, int kv_head, const std::vector<Visible>& visible, Thread& thread) const {
    int low = visible[0].low, high = visible[0].high;
    for (const Visible& each : visible) low = std::min(low, each.low), high = std::max(high, each.high);
    collect_stripes(shape_, storage_, blocks(span, tile), kv_head, low, high, Products<Kind>::kStripesOfProduct,
                    thread.tile.stripes);
  }

  void run_all_tiles(const Item& item, const Item* next, Thread& thread) const {
    const Span& span = step_.spans[item.first_span];
    const int64_t lanes = shape_.value_lanes(), first_row = item.first_row, num_rows = item.num_rows;
    thread.queries.resize(num_rows * query_stride_);
    thread.so_far_values.resize(num_rows * lanes);
    thread.so_far.resize(num_rows);
    thread.visible.resize(num_rows);
    for (int64_t i = 0; i < num_rows; ++i) {
      load_query(span, item.kv_head, first_row + i, thread, &thread.queries[i * query_stride_]);
      thread.so_far[i] = {0, 0, &thread.so_far_values[i * lanes]};
    }
    const int64_t first_position = span.start + first_row / shape_.group_size();
    const int64_t last_position = span.start + (first_row + num_rows - 1) / shape_.group_size();
    const int64_t end = shape_.end_visible(last_position, span.end, span.is_item);
    const int64_t last_tile = (end - 1) / shape_.tile_size();
    for (int64_t tile = shape_.first_visible(first_position) / shape_.tile_size(); tile <= last_tile; ++tile) {
      if (sees_whole(span, first_position, last_position, tile))
        std::fill(thread.visible.begin(), thread.visible.end(), Visible{0, int(shape_.tile_size())});
      else
        for (int64_t i = 0; i < num_rows; ++i) thread.visible[i] = visible(span, first_row + i, tile);
      collect(item.first_span, tile, item.kv_head, thread.visible, thread);
      if (tile == last_tile) {
        foresee(next, thread);
      } else {
        foresee(item.first_span, tile + 1, item.kv_head, 0, end, thread);
      }
      attend_tile<Kind>(shape_, thread.queries.data(), query_stride_, int(num_rows), thread.visible.data(), thread.tile,
                        thread.so_far.data());
    }
    for (int64_t i = 0; i < num_rows; ++i) finish(span, item.kv_head, first_row + i, thread.so_far[i]);
  }

  // Compute one tile for all spans that have it, reading it once.
  void run_tile_apart(const Item& item, Thread& thread) {
    thread.queries.clear(), thread.visible.clear(), thread.next.clear();
    std::vector<Partial*> results;
    for (int64_t m = item.first_span; m < item.first_span + item.num_spans; ++m) {
      const Apart& apart = apart_[members_[m]];
      const Span& span = step_.spans[apart.span];
      for (int64_t row = 0; row < num_rows(span); ++row) {
        thread.queries.resize(thread.queries.size() + query_stride_);
        load_query(span, item.kv_head, row, thread, &thread.queries[thread.queries.size() - query_stride_]);
        thread.visible.push_back(visible(span, row, item.tile));
        results.push_back(&partial(apart, item.tile, item.kv_head, row));
        thread.next.push_back(*results.back());
      }
    }
    collect(apart_[members_[item.first_span]].span, item.tile, item.kv_head, thread.visible, thread);
    const int64_t num_rows = int64_t(results.size());
    for (int64_t row = 0; row < num_rows; row += kMaxRowsOfItem)
      attend_tile<Kind>(shape_, &thread.queries[row * query_stride_], query_stride_,
                        int(std::min(kMaxRowsOfItem, num_rows - row)), &thread.visible[row], thread.tile,
                        &thread.next[row]);
    for (int64_t row = 0; row < num_rows; ++row) *results[row] = thread.next[row];
  }

  const Storage<Kind> storage_;
  const int64_t query_stride_;
};

// Calls function(Kind) with the cache's kind of storage.
template <class Function>
void with_kind(ScalarType stored, const Function& function) {
  if (stored == kFloat) return function(Float32{});
  if (stored == kBFloat16) return function(BFloat16{});
  if (stored == kChar) return function(Int8{});
  CHECK(stored == kByte, "the cache must be float32, bfloat16, int8 or, of two numbers each, uint8");
  function(Int4{});
}

void check_activations(ScalarType dtype) {
  CHECK(dtype == kFloat || dtype == kBFloat16, "activations must be float32 or bfloat16");
}

Tensor with_whole_heads(const Tensor& states) {
  return states.stride(-1) == 1 ? states : states.contiguous();
}

// Number the whole tiles of a cache group, so that equal numbers of a tile mean equal blocks.
void find_shared_tiles(const Step& step, int block_size, GroupStep& group) {
  const int64_t per_tile = std::max(1, kTileSize / block_size), width = group.tables.size(1);
  const auto* tables = reinterpret_cast<const char*>(group.tables.data_ptr<int32_t>());
  std::unordered_map<std::string_view, int> owners;
  group.tile_owners.assign(step.spans.size(), {});
  for (size_t s = 0; s < step.spans.size(); ++s) {
    const int64_t num_whole = step.spans[s].end / (per_tile * block_size);
    for (int64_t tile = 0; tile < num_whole; ++tile) {
      const std::string_view blocks(tables + (s * width + tile * per_tile) * 4, per_tile * 4);
      group.tile_owners[s].push_back(owners.emplace(blocks, int(s)).first->second);
    }
  }
}

// One cache group's part of a step whose spans are known.
GroupStep group_step(const Step& step, const Tensor& indices, const Tensor& tables) {
  check_whole(indices, "cache indices", 1, kLong);
  check_whole(tables, "block tables", 2, kInt);
  CHECK(tables.size(0) >= int64_t(step.spans.size()), "there are fewer block tables than spans");
  GroupStep group{indices, tables, -1, -1, {}, {}};
  const int64_t* index = indices.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < indices.size(0); ++row) group.last_index = std::max(group.last_index, index[row]);
  for (size_t s = 0; s < step.spans.size(); ++s) {
    const int32_t* table = tables.const_data_ptr<int32_t>() + s * tables.size(1);
    const int64_t num_blocks = (step.spans[s].end + step.block_size - 1) / step.block_size;
    CHECK(num_blocks <= tables.size(1), "a block table is shorter than its sequence");
    int64_t first = num_blocks;
    for (int64_t i = 0; i < num_blocks; ++i) group.last_block = std::max<int64_t>(group.last_block, table[i]);
    while (first > 0 && table[first - 1] >= 0) --first;
    group.first_blocks.push_back(first);
  }
  find_shared_tiles(step, step.block_size, group);
  return group;
}

// The step that a call belongs to, if the step's blocks lie in the call's memory.
std::shared_ptr<const Step> step_of(const Call& call) {
  std::shared_ptr<const Step> step = call.step->get();
  CHECK(size_t(call.group) < step->groups.size(), "the step has no cache group ", call.group);
  CHECK(step->block_size == call.shape.block_size, "the step has blocks of ", step->block_size, " tokens, not of ",
              call.shape.block_size);
  const GroupStep& group = step->groups[call.group];
  const int64_t num_blocks = call.stored.size(0);
  CHECK(group.last_index < num_blocks * step->block_size && group.last_block < num_blocks,
              "the step names blocks beyond the ", num_blocks, " of the cache");
  return step;
}

void check_heads(const Tensor& states, const char* name, int64_t num_heads, int64_t head_size) {
  check_strided(states, name, 3);
  check_size(states, name, 1, num_heads);
  check_size(states, name, 2, head_size);
}

}  // namespace

void check(const Call& call) {
  const Shape& shape = call.shape;
  CHECK(shape.num_heads > 0 && shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
              "query heads must be a multiple of key heads");
  CHECK(shape.head_size > 0 && shape.value_head_size > 0 && shape.block_size > 0, "sizes must be positive");
  CHECK(shape.window >= 0 && shape.chunk >= 0 && call.group >= 0, "windows, chunks and groups cannot be negative");
  check_strided(call.stored, "the cache", 4);
  CHECK(call.stored.is_contiguous(), "the cache must be contiguous");
  check_size(call.stored, "the cache", 1, shape.num_kv_heads);
  check_size(call.stored, "the cache", 2, shape.stripes_per_block());
  with_kind(call.dtype, [&](auto kind) {
    const int64_t bytes = StripeLayout<decltype(kind)>(shape).end, given = call.stored.size(3) * call.stored.element_size();
    CHECK(given == bytes, "a stripe of the cache has ", given, " bytes, not ", bytes);
  });
}

void begin_step(CurrentStep& current, int64_t block_size, const Tensor& query_lens, const Tensor& kv_lens,
                const std::optional<Tensor>& items, const std::vector<Tensor>& indices, const std::vector<Tensor>& tables) {
  check_whole(query_lens, "query lengths", 1, kLong);
  check_whole(kv_lens, "key lengths", 1, kLong);
  check_size(kv_lens, "key lengths", 0, query_lens.size(0));
  if (items) check_whole(*items, "items", 1, kLong);
  if (items) check_size(*items, "items", 0, query_lens.size(0));
  CHECK(block_size > 0 && block_size <= kMaxBlockSize, "the block size is ", block_size);
  CHECK(indices.size() == tables.size(), "every cache group needs indices and tables");
  const int64_t *lengths = query_lens.const_data_ptr<int64_t>(), *ends = kv_lens.const_data_ptr<int64_t>();
  const int64_t* is_item = items ? items->const_data_ptr<int64_t>() : nullptr;
  const auto step = std::make_shared<Step>();
  step->block_size = int(block_size);
  for (int64_t s = 0; s < query_lens.size(0); ++s) {
    CHECK(0 < lengths[s] && lengths[s] <= ends[s] && ends[s] <= kMaxTokens, "a span has ", lengths[s], " of ",
                ends[s], " tokens");
    step->spans.push_back({step->num_rows, ends[s] - lengths[s], ends[s], is_item && is_item[s]});
    step->num_rows += lengths[s];
  }
  for (size_t g = 0; g < indices.size(); ++g) step->groups.push_back(group_step(*step, indices[g], tables[g]));
  current.set(step);
}

void write(const Call& call, const Tensor& key, const Tensor& value) {
  const auto step = step_of(call);
  check_heads(key, "keys", call.shape.num_kv_heads, call.shape.head_size);
  check_heads(value, "values", call.shape.num_kv_heads, call.shape.value_head_size);
  check_size(value, "values", 0, key.size(0));
  CHECK(value.scalar_type() == key.scalar_type(), "keys and values must be of one dtype");
  const Tensor keys = with_whole_heads(key), values = with_whole_heads(value);
  const Tensor& indices = step->groups[call.group].indices;
  check_activations(key.scalar_type());
  with_kind(call.dtype, [&](auto kind) {
    if (key.scalar_type() == kFloat) write_rows<decltype(kind), float>(call, indices, keys, values);
    else write_rows<decltype(kind), bfloat16>(call, indices, keys, values);
  });
}

Tensor attend(const Call& call, const Tensor& query, const std::optional<Tensor>& sinks) {
  const auto step = step_of(call);
  check_heads(query, "queries", call.shape.num_heads, call.shape.head_size);
  CHECK(query.size(0) >= step->num_rows, "the step has ", step->num_rows, " tokens, and there are ", query.size(0),
              " queries");
  if (sinks) {
    check_whole(*sinks, "sinks", 1, kFloat);
    check_size(*sinks, "sinks", 0, call.shape.num_heads);
  }
  const std::vector<int64_t>& first_blocks = step->groups[call.group].first_blocks;
  for (size_t s = 0; s < step->spans.size(); ++s)
    CHECK(call.shape.first_visible(step->spans[s].start) / step->block_size >= first_blocks[s],
                "a block that a query sees was let go");
  check_activations(query.scalar_type());
  const Tensor queries = with_whole_heads(query);
  const int64_t num_rows = query.size(0);
  Tensor output = empty({num_rows, call.shape.num_heads, call.shape.value_head_size}, query.scalar_type());
  if (step->num_rows < num_rows) {
    const Tensor others = output.narrow(step->num_rows, num_rows - step->num_rows);
    std::memset(others.data_ptr(), 0, others.nbytes());
  }
  with_kind(call.dtype, [&](auto kind) {
    Attention<decltype(kind)>(call, *step, queries, sinks ? sinks->data_ptr<float>() : nullptr, output).run();
  });
  return output;
}

}  // namespace inflight
