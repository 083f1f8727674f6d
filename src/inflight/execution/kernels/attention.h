// Paged attention for a step's spans: work partitioning and merge order.
#pragma once

#include "tensor.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attend_tile.h"
#include "current.h"

namespace inflight {

// Tokens [start, end) of a sequence; the first is at index `row` of the row. They may be an item's last ones.
struct Span {
  int64_t row, start, end;
  bool is_item;
};

// One cache group's part of a step.
struct GroupStep {
  Tensor indices, tables;  // [T] int64 and [S, max_blocks] int32
  int64_t last_index, last_block;  // the greatest of each, as far as spans reach; -1: there are none
  std::vector<int64_t> first_blocks;  // of each span's table: from here on it names a block in every place
  // A number for each whole tile of each span: spans with equal numbers have the same blocks there.
  std::vector<std::vector<int>> tile_owners;
};

struct Step {
  int64_t num_rows = 0;
  int block_size = 0;
  std::vector<Span> spans;
  std::vector<GroupStep> groups;
};

using CurrentStep = Current<Step>;

struct Call {
  Shape shape;
  int group;
  Tensor stored;  // `[N, Hkv, stripes, bytes]` of any dtype
  ScalarType dtype;  // of keys and values
  std::shared_ptr<CurrentStep> step;  // of the backend that owns this call
};

// Refuses inconsistent sizes, or memory of the wrong size.
void check(const Call& call);

void begin_step(CurrentStep& step, int64_t block_size, const Tensor& query_lens, const Tensor& kv_lens,
                const std::optional<Tensor>& items, const std::vector<Tensor>& indices, const std::vector<Tensor>& tables);

// Store keys `[T, Hkv, Dk]` and values `[T, Hkv, Dv]` at the step's cache indices.
void write(const Call& call, const Tensor& key, const Tensor& value);

// Queries `[T, H, Dk]`, sinks `[H]` float32; returns `[T, H, Dv]` in the dtype of the queries, 0 in rows of no span.
Tensor attend(const Call& call, const Tensor& query, const std::optional<Tensor>& sinks);

}  // namespace inflight
