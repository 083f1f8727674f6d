// Collectives of tensor parallelism: all-reduce and all-gather. The ranks are processes of one machine that map the
// same file. Each writes its rows into its own place and signals; after all signals, each reads all places in rank
// order, so all get the same bits. Two sets of places alternate: a rank that writes into one knows that all others have
// read its old content, because they have written into the other since.
#pragma once

#include "tensor.h"

#include <atomic>
#include <cstdint>

namespace inflight {

class Exchange {
 public:
  // `file` is empty at first, and the same for all ranks. Each may write `place_bytes` at a time.
  Exchange(int64_t file, int64_t rank, int64_t num_ranks, int64_t place_bytes);
  Exchange(const Exchange&) = delete;
  ~Exchange();

  // Step numbers grow. A rank throws if another abandons the step, or moves on to the next.
  void begin(int64_t step);
  void give_up();
  // Whether another rank has done so.
  bool is_given_up() const;
  // A rank has ended: all waiting calls throw, now and later.
  void end();

  // Rows `[…, n]`, float32 or bfloat16, of each rank; returns their sum, added in float32 and rounded once.
  Tensor sum(const Tensor& rows);
  // Rows `[…, n]` of each rank; returns `[…, num_ranks * n]`, side by side.
  Tensor gather(const Tensor& rows);

 private:
  struct Head;
  struct Said;

  char* place(int64_t rank) const;
  void wait_for_others();

  int64_t rank_, num_ranks_, place_bytes_, file_bytes_;
  char* memory_ = nullptr;
  Head* head_ = nullptr;
  Said* said_ = nullptr;
  uint64_t step_ = 0, barrier_ = 0;
};

}  // namespace inflight
