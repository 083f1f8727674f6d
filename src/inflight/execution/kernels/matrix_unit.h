// The CPU's matrix unit (AMX), if this build may use it: tile configuration and products.
//
// Tiles 0 to 3 are sums, for two times sixteen rows and two times sixteen outputs; 4 and 5 are rows of operands of four
// bytes; 6 and 7 are operands of outputs. (The intrinsics take tile numbers as literals: no loop.)
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VBMI__)
#define INFLIGHT_MATRIX_UNIT

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace inflight {

constexpr int kTileRows = 16, kTileOperands = 16, kGroupRows = 2 * kTileRows;
constexpr int64_t kTileRowBytes = 4 * kTileOperands;

// Shapes the tiles for up to `kGroupRows` rows and up to `kTileOperands` operands; the sums are lost.
inline void shape_tiles(int num_rows, int num_operands) {
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  const int first = std::min(num_rows, kTileRows), second = num_rows - first;
  const int tile_rows[] = {first, first, second, second, first, second, num_operands, num_operands};
  for (int tile = 0; tile < 8; ++tile) {
    const int size = tile == 4 || tile == 5 ? num_operands : kTileOperands;
    shapes.rows[tile] = uint8_t(tile_rows[tile]);
    shapes.row_bytes[tile] = uint16_t(tile_rows[tile] ? 4 * size : 0);
  }
  asm volatile("" ::: "memory");  // the compiler does not know what is read
  _tile_loadconfig(&shapes);
}

inline void clear_sums(int num_rows) {
  _tile_zero(0);
  _tile_zero(1);
  if (num_rows <= kTileRows) return;  // there are no others
  _tile_zero(2);
  _tile_zero(3);
}

struct Nothing {
  void operator()(int) const {}
};

// Adds the products of rows with the operands of two times sixteen outputs to the sums. Rows, and operands of the same
// outputs, lie this many bytes apart. Streamed rows leave the L1 cache to the operands. Between the products beside(0) to
// beside(3) are called: what they do takes no time of its own.
template <bool kIsInt8, bool kStreamsRows = false, class Beside = Nothing>
[[gnu::always_inline]] inline void add_tile_products(const char* rows, int num_rows, int64_t row_bytes, const char* left,
                                                     const char* right, int64_t operand_bytes,
                                                     const Beside& beside = {}) {
  _tile_loadd(6, left, operand_bytes);
  _tile_loadd(7, right, operand_bytes);
  if constexpr (kStreamsRows) _tile_stream_loadd(4, rows, row_bytes);
  else _tile_loadd(4, rows, row_bytes);
  if constexpr (kIsInt8) {
    _tile_dpbusd(0, 4, 6);
    beside(0);
    _tile_dpbusd(1, 4, 7);
    beside(1);
  } else {
    _tile_dpbf16ps(0, 4, 6);
    beside(0);
    _tile_dpbf16ps(1, 4, 7);
    beside(1);
  }
  if (num_rows <= kTileRows) return;
  if constexpr (kStreamsRows) _tile_stream_loadd(5, rows + kTileRows * row_bytes, row_bytes);
  else _tile_loadd(5, rows + kTileRows * row_bytes, row_bytes);
  if constexpr (kIsInt8) {
    _tile_dpbusd(2, 5, 6);
    beside(2);
    _tile_dpbusd(3, 5, 7);
    beside(3);
  } else {
    _tile_dpbf16ps(2, 5, 6);
    beside(2);
    _tile_dpbf16ps(3, 5, 7);
    beside(3);
  }
}

}  // namespace inflight

#endif
