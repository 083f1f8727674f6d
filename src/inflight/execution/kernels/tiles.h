// The CPU's matrix unit (AMX): rows of operands times a panel, sixteen rows and sixteen operands of four bytes at a
// time. A panel already has the unit's layout: sixteen operands of sixteen outputs are one tile.
#pragma once

#include "matrix_unit.h"

#ifdef INFLIGHT_MATRIX_UNIT

#include "aligned.h"
#include "parallel.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "panels.h"

namespace inflight {

constexpr int64_t kPanelBytes = 4 * kPanelOutputs;

// Rows in the order in which the unit reads them: `[rows / 32, operands / 16, 32, 16]`; padding may hold anything.
// (Rows that lie a power of two apart would evict each other from the cache.)
class TiledRows {
 public:
  TiledRows(const void* rows, int64_t num_rows, int64_t num_operands)
      : num_tiles_((num_operands + kTileOperands - 1) / kTileOperands),
        bytes_(std::move(spare())) {
    const size_t size = (num_rows + kGroupRows - 1) / kGroupRows * num_tiles_ * kGroupRows * kTileRowBytes;
    if (bytes_.size() < size) bytes_ = AlignedVector<char>(size);
    const int64_t row_bytes = 4 * num_operands, num_groups = (num_rows + kGroupRows - 1) / kGroupRows;
    for_each_range(num_groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * kGroupRows; first < std::min(num_rows, end * kGroupRows); first += kGroupRows) {
        const int64_t count = std::min<int64_t>(kGroupRows, num_rows - first);
        const char* from = static_cast<const char*>(rows) + first * row_bytes;
        char* to = bytes_.data() + place_of(first, 0);
        int64_t left = row_bytes;
        for (; left >= kTileRowBytes; left -= kTileRowBytes, from += kTileRowBytes, to += kGroupRows * kTileRowBytes)
          for (int64_t row = 0; row < count; ++row)
            std::memcpy(to + row * kTileRowBytes, from + row * row_bytes, kTileRowBytes);
        for (int64_t row = 0; row < count && left > 0; ++row)
          std::memcpy(to + row * kTileRowBytes, from + row * row_bytes, left);
      }
    });
  }

  ~TiledRows() { spare() = std::move(bytes_); }
  TiledRows(const TiledRows&) = delete;
  TiledRows& operator=(const TiledRows&) = delete;

  // Rows from the given first one on, from a tile of operands on.
  const char* at(int64_t row, int64_t tile) const { return bytes_.data() + place_of(row, tile); }

 private:
  int64_t place_of(int64_t row, int64_t tile) const {
    return (row / kGroupRows * num_tiles_ + tile) * kGroupRows * kTileRowBytes;
  }

  // This thread's reused memory: fresh pages would cost as much as the copy.
  static AlignedVector<char>& spare() {
    thread_local AlignedVector<char> bytes;
    return bytes;
  }

  int64_t num_tiles_;
  AlignedVector<char> bytes_;
};

// One thread's unit, configured while this object lives.
class MatrixUnit {
 public:
  ~MatrixUnit() { _tile_release(); }

  // Adds products to sums, `[rows, 32]` int32 or float, of up to `kGroupRows` rows: of `count` times `num_operands`
  // operands. `meanwhile` is called once for each of these times. The sums stay in the unit until there are others, or
  // `settle`.
  template <bool kStreamsRows, class Sum, class Meanwhile>
  void add_products(const char* rows, int num_rows, const char* panel, int64_t count, int num_operands, Sum* sums,
                    const Meanwhile& meanwhile) {
    hold(sums, num_rows, num_operands);
    constexpr bool kIsInt8 = std::is_same_v<Sum, int32_t>;
    asm volatile("" ::: "memory");  // the compiler does not know what is read
    for (int64_t i = 0; i < count; ++i, panel += num_operands * kPanelBytes, rows += kGroupRows * kTileRowBytes) {
      meanwhile();
      add_tile_products<kIsInt8, kStreamsRows>(rows, num_rows, kTileRowBytes, panel, panel + kPanelBytes / 2, kPanelBytes);
    }
  }

  // New sums, which are zero, of up to `kGroupRows` rows. They will be written to `[rows, 32]` int32 or float.
  void begin(void* sums, int num_rows) {
    settle();
    shape(num_rows, kTileOperands);
    clear_sums(num_rows);
    held_ = sums;
  }

  // Writes the sums to where they belong.
  void settle() {
    if (!held_) return;
    _tile_stored(0, place_of(0), kPanelBytes);
    _tile_stored(1, place_of(1), kPanelBytes);
    if (num_rows_ > kTileRows) {
      _tile_stored(2, place_of(2), kPanelBytes);
      _tile_stored(3, place_of(3), kPanelBytes);
    }
    held_ = nullptr;
  }

 private:
  // Where a tile's sums lie.
  char* place_of(int tile) const {
    return static_cast<char*>(held_) + tile / 2 * kTileRows * kPanelBytes + tile % 2 * (kPanelBytes / 2);
  }

  void hold(void* sums, int num_rows, int num_operands) {
    if (sums == held_ && num_rows == num_rows_ && num_operands == num_operands_) return;
    settle();
    shape(num_rows, num_operands);
    held_ = sums;
    asm volatile("" ::: "memory");  // nor that all of this is
    _tile_loadd(0, place_of(0), kPanelBytes);
    _tile_loadd(1, place_of(1), kPanelBytes);
    if (num_rows > kTileRows) {
      _tile_loadd(2, place_of(2), kPanelBytes);
      _tile_loadd(3, place_of(3), kPanelBytes);
    }
  }

  void shape(int num_rows, int num_operands) {
    if (num_rows == num_rows_ && num_operands == num_operands_) return;
    num_rows_ = num_rows, num_operands_ = num_operands;
    shape_tiles(num_rows, num_operands);
  }

  int num_rows_ = 0, num_operands_ = 0;
  void* held_ = nullptr;
};

// Adds the products of a group of rows, from `first_row` on, with `steps` operands from `first_step` on, a multiple of
// kTileOperands, to their sums. Calls `meanwhile` for each tile of operands.
template <class Sum, class Meanwhile>
void add_group(MatrixUnit& unit, const TiledRows& rows, int64_t first_row, const RowGroup& group, int64_t first_step,
               const void* part, int64_t steps, Sum* sums, const Meanwhile& meanwhile) {
  const int64_t num_tiles = steps / kTileOperands, rest = steps % kTileOperands;
  const char* operands = rows.at(first_row, first_step / kTileOperands);
  const auto* panel = static_cast<const char*>(part);
  const int count = int(group.count);
  if (num_tiles > 0 && group.num_groups > 1)
    unit.add_products<true>(operands, count, panel, num_tiles, kTileOperands, sums, meanwhile);
  else if (num_tiles > 0)
    unit.add_products<false>(operands, count, panel, num_tiles, kTileOperands, sums, meanwhile);
  if (rest > 0)
    unit.add_products<false>(operands + num_tiles * kGroupRows * kTileRowBytes, count,
                             panel + num_tiles * kTileOperands * kPanelBytes, 1, int(rest), sums, [] {});
}

// Calls `function(group)` for all groups of rows that the unit multiplies together.
template <class Function>
void for_each_tile_group(int64_t num_rows, const Function& function) {
  const int64_t num_groups = (num_rows + kGroupRows - 1) / kGroupRows;
  for (int64_t number = 0, row = 0; row < num_rows; ++number, row += kGroupRows)
    function(RowGroup{row, std::min<int64_t>(kGroupRows, num_rows - row), number, num_groups});
}

// Sums of rows with a panel in parts: each part stays in the L1 cache while all rows use it.
template <class Sum>
struct TileSums {
  static constexpr int64_t kMaxRows = 256, kRowsHeld = kGroupRows;  // rows whose sums stay in the unit from part to part
  using Rows = TiledRows;

  alignas(64) Sum sums[kMaxRows][kPanelOutputs];
  MatrixUnit unit;

  void clear(int64_t num_rows) { std::memset(sums, 0, num_rows * sizeof sums[0]); }
  // Before the sums are read.
  void settle() { unit.settle(); }

  // As `add_group`, for all groups.
  void add(const Rows& rows, int64_t first_row, int64_t num_rows, int64_t first_step, const void* part, int64_t steps) {
    for_each_tile_group(num_rows, [&](const RowGroup& group) {
      add_group(unit, rows, first_row + group.first, group, first_step, part, steps, sums[group.first], [] {});
    });
  }
};

}  // namespace inflight

#endif
