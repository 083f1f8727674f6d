// The layout of keys and values in the cache, and how a tile's are found and prefetched.
#pragma once

#include <algorithm>
#include <vector>

#include "stored.h"

namespace inflight {

constexpr int kTileSize = 256;
constexpr int64_t kLineBytes = 64;  // of the processor's cache
constexpr int kStripesAtOnce = 4;

// An attention call of the model: its shape, and the storage of its keys and values.
//
// A block holds, for each key/value head, stripes of kLanes tokens (the last one partly used, if the block size is no
// multiple of that): `[N, Hkv, stripes, bytes of a stripe]`. A stripe is one piece of memory and holds, in
// this order:
// - keys, packs `[Dk / pack, lanes]`: one token a lane;
// - values, packs `[lanes / pack, Dv]`: one dimension a lane, Dv rounded up to lanes;
// - for eight and four bits, the scales of the keys and then those of the values, `[lanes]` floats each, one for each token
//   and head.
struct Shape {
  int num_heads, num_kv_heads, head_size, value_head_size;
  float scale;
  int64_t window, chunk;  // 0: none
  float softcap;          // 0: none
  int block_size;
  bool is_causal;
  bool sees_items = false;  // whether the tokens of an item, as an image, see each other

  int group_size() const { return num_heads / num_kv_heads; }
  int stripes_per_block() const { return (block_size + kLanes - 1) / kLanes; }
  int blocks_per_tile() const { return std::max(1, kTileSize / block_size); }
  int64_t tile_size() const { return int64_t(blocks_per_tile()) * block_size; }
  int key_steps(int pack) const { return (head_size + pack - 1) / pack; }
  int value_lanes() const { return int(round_up(value_head_size, kLanes)); }
  // The first position that a query sees.
  int64_t first_visible(int64_t position) const {
    int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return chunk ? std::max(first, position / chunk * chunk) : first;
  }
  // One more than the last that it sees, if its sequence has `length` keys by now; of an item, these end with it.
  int64_t end_visible(int64_t position, int64_t length, bool is_item) const {
    if (is_causal) return is_item && sees_items ? length : position + 1;
    const int64_t end = window ? std::min(length, position + window) : length;
    return chunk ? std::min(end, (position / chunk + 1) * chunk) : end;
  }
};

template <class Kind>
struct Stripe {
  typename Kind::Stored *keys, *values;
  float *key_scales, *value_scales;  // of eight and four bits
  int position;                      // of its first token, from the tile's first
  int length;                        // tokens that belong to the sequence
};

// Where the parts of a stripe begin, and where it ends: in bytes.
template <class Kind>
struct StripeLayout {
  static constexpr int64_t kScaleBytes = Kind::kIsScaled ? kLanes * sizeof(float) : 0;
  static constexpr int64_t kVectorBytes = Kind::kUnits * sizeof(typename Kind::Stored);  // the packs of all lanes
  const int64_t values, key_scales, value_scales, end;

  explicit StripeLayout(const Shape& shape)
      : values(shape.key_steps(Kind::kPack) * kVectorBytes),
        key_scales(values + shape.value_lanes() / Kind::kPack * kVectorBytes),
        value_scales(key_scales + kScaleBytes),
        end(value_scales + kScaleBytes) {}
};

// All stripes of an attention call, by number.
template <class Kind>
struct Storage {
  char* memory;
  StripeLayout<Kind> layout;

  Stripe<Kind> stripe(int64_t number) const {
    using Stored = typename Kind::Stored;
    char* begin = memory + number * layout.end;
    const auto scales = [&](int64_t at) { return layout.kScaleBytes ? reinterpret_cast<float*>(begin + at) : nullptr; };
    return {reinterpret_cast<Stored*>(begin), reinterpret_cast<Stored*>(begin + layout.values),
            scales(layout.key_scales), scales(layout.value_scales), 0, kLanes};
  }
};

// Some tokens' contribution to a row: `values` are weighted with exp(score - max), `sum` is the sum of the weights.
struct Partial {
  float max, sum;
  float* values;
};

// Factors for merging a row's values with those of more tokens: `old` for the old ones, `fresh` for the others.
struct Shares {
  float old, fresh;

  void merge(float* old_values, Floats others) const {
    if (fresh == 0) return;
    store(old_values, old == 0 ? others : load<Floats>(old_values) * old + others * fresh);
  }
};

// The keys that a row sees: positions from the tile's first, [low, high).
struct Visible {
  int low, high;
};

// Prefetches the stripes of the next tile while one is computed: a sequence's blocks are scattered, so the hardware
// prefetcher cannot. It takes a few stripes at a time, a few lines with each step of the computation, into the L2
// cache, which has more outstanding loads than L1, and holds a tile.
template <class Kind>
class Prefetcher {
 public:
  Prefetcher(const std::vector<Stripe<Kind>>& stripes, int64_t stripe_bytes)
      : next_(stripes.data()), end_(next_ + stripes.size()), stripe_bytes_(stripe_bytes), offset_(stripe_bytes), asked_(stripe_bytes) {}

  // The next `num_bytes` of kStripesAtOnce stripes each.
  void advance(int64_t num_bytes) {
    for (asked_ += num_bytes; offset_ < asked_; offset_ += kLineBytes) {
      if (offset_ >= stripe_bytes_ && !begin_stripes()) return;
      for (const char* stripe : stripes_) __builtin_prefetch(stripe + offset_, 0, 2);
    }
  }

 private:
  bool begin_stripes() {
    if (next_ >= end_) return false;
    for (int s = 0; s < kStripesAtOnce; ++s)
      stripes_[s] = reinterpret_cast<const char*>(std::min(next_ + s, end_ - 1)->keys);
    next_ += kStripesAtOnce;
    asked_ -= stripe_bytes_, offset_ -= stripe_bytes_;
    return true;
  }

  const Stripe<Kind>*next_, *end_;
  const int64_t stripe_bytes_;
  int64_t offset_, asked_;  // in `stripes_`: prefetched so far, and due
  const char* stripes_[kStripesAtOnce] = {};
};

// Collect the stripes with visible positions [low, high), from a multiple of `together` on: the terms of one product
// must not depend on where the first of several rows begins. Stripes before the first visible one are empty; their
// blocks may have been freed.
template <class Kind>
void collect_stripes(const Shape& shape, const Storage<Kind>& storage, const int32_t* blocks, int kv_head, int low,
                     int high, int together, std::vector<Stripe<Kind>>& stripes) {
  const int per_block = shape.stripes_per_block(), block_size = shape.block_size;
  const auto stripe_at = [&](int number) {
    return storage.stripe((int64_t(blocks[number / per_block]) * shape.num_kv_heads + kv_head) * per_block +
                          number % per_block);
  };
  const int first = low / block_size * per_block + low % block_size / kLanes;
  stripes.clear();
  for (int number = first / together * together;; ++number) {
    const int offset = number % per_block * kLanes, position = number / per_block * block_size + offset;
    if (std::max(position, low) >= high) return;
    stripes.push_back(stripe_at(std::max(number, first)));
    stripes.back().position = position;
    stripes.back().length = number < first ? 0 : std::min({kLanes, block_size - offset, high - position});
  }
}

}  // namespace inflight
