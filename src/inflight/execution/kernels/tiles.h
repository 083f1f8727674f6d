// A CPU's matrix unit (AMX): rows of operands times a panel, sixteen rows and sixteen operands of four bytes at a time.
//
// A panel already lies as the unit needs it: sixteen operands of sixteen outputs are one of its tiles.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define INFLIGHT_TILES

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace inflight {

constexpr int kTileRows = 16, kTileOperands = 16, kGroupRows = 2 * kTileRows;
constexpr int64_t kRowBytes = 4 * kTileOperands;

// A process may use the unit once Linux has permitted it.
inline bool may_use_tiles() {
  constexpr int kAskForLeave = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kAskForLeave, kTileData) == 0;
  return may;
}

// Rows in the order in which the unit reads them: `[rows / 32, operands / 16, 32, 16]`; padding may hold anything.
// (Rows that lie a power of two apart would evict each other from the cache.)
class TiledRows {
 public:
  TiledRows(const void* rows, int64_t num_rows, int64_t num_operands)
      : num_tiles_((num_operands + kTileOperands - 1) / kTileOperands),
        bytes_(new char[(num_rows + kGroupRows - 1) / kGroupRows * num_tiles_ * kGroupRows * kRowBytes]) {
    at::parallel_for(0, num_rows, 32, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const char* from = static_cast<const char*>(rows) + row * 4 * num_operands;
        for (int64_t tile = 0; tile < num_tiles_; ++tile, from += kRowBytes)
          std::memcpy(at(row - row % kGroupRows, tile) + row % kGroupRows * kRowBytes, from,
                      std::min<int64_t>(kRowBytes, 4 * (num_operands - tile * kTileOperands)));
      }
    });
  }

  // Rows from the given first one on, from a tile of operands on.
  char* at(int64_t row, int64_t tile) const {
    return bytes_.get() + (row / kGroupRows * num_tiles_ + tile) * kGroupRows * kRowBytes;
  }

 private:
  int64_t num_tiles_;
  std::unique_ptr<char[]> bytes_;
};

// One thread's unit, as long as this object lives. Tiles 0 to 3 are sums, for two times sixteen rows and outputs; 4 and 5
// are rows of operands; 6 and 7 are operands of outputs. (The intrinsics take tile numbers as literals: no loop.)
class MatrixUnit {
 public:
  ~MatrixUnit() { _tile_release(); }

  // Adds products to sums, `[rows, 32]`, of up to `kGroupRows` rows: of `count` times `num_operands` operands. Prefetches
  // what lies `bytes_ahead` in the panel, unless that is 0.
  template <bool kIsInt8, class Sum>
  void add_products(const char* rows, int num_rows, const char* panel, int64_t bytes_ahead, int64_t count,
                    int num_operands, Sum* sums) {
    constexpr int64_t kPanelBytes = 4 * 2 * kTileOperands;
    shape(num_rows, num_operands);
    asm volatile("" ::: "memory");  // the compiler does not know what is read
    const bool has_second = num_rows > kTileRows;
    Sum* second_sums = sums + kTileRows * 2 * kTileOperands;
    _tile_loadd(0, sums, kPanelBytes);
    _tile_loadd(1, sums + kTileOperands, kPanelBytes);
    if (has_second) {
      _tile_loadd(2, second_sums, kPanelBytes);
      _tile_loadd(3, second_sums + kTileOperands, kPanelBytes);
    }
    for (int64_t i = 0; i < count; ++i, panel += num_operands * kPanelBytes, rows += kGroupRows * kRowBytes) {
      if (bytes_ahead)
        for (int64_t line = 0; line < num_operands * kPanelBytes; line += 64)
          _mm_prefetch(panel + bytes_ahead + line, _MM_HINT_T1);
      _tile_loadd(6, panel, kPanelBytes);
      _tile_loadd(7, panel + kPanelBytes / 2, kPanelBytes);
      _tile_loadd(4, rows, kRowBytes);
      if constexpr (kIsInt8) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (!has_second) continue;
      _tile_loadd(5, rows + kTileRows * kRowBytes, kRowBytes);
      if constexpr (kIsInt8) {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      } else {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, kPanelBytes);
    _tile_stored(1, sums + kTileOperands, kPanelBytes);
    if (has_second) {
      _tile_stored(2, second_sums, kPanelBytes);
      _tile_stored(3, second_sums + kTileOperands, kPanelBytes);
    }
  }

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  void shape(int num_rows, int num_operands) {
    if (num_rows == num_rows_ && num_operands == num_operands_) return;
    num_rows_ = num_rows, num_operands_ = num_operands;
    const int first = std::min(num_rows, kTileRows), second = num_rows - first;
    const int tile_rows[] = {first, first, second, second, first, second, num_operands, num_operands};
    Shapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      const int size = tile == 4 || tile == 5 ? num_operands : kTileOperands;
      shapes.rows[tile] = uint8_t(tile_rows[tile]);
      shapes.row_bytes[tile] = uint16_t(tile_rows[tile] ? 4 * size : 0);
    }
    asm volatile("" ::: "memory");  // nor that all of this is
    _tile_loadconfig(&shapes);
  }

  int num_rows_ = 0, num_operands_ = 0;
};

}  // namespace inflight

#endif
