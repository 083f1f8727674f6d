#include "exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "checks.h"
#include "convert.h"
#include "parallel.h"

namespace inflight {
namespace {

using Clock = std::chrono::steady_clock;

// How long a rank spins for the others, before it yields its core, and finally sleeps between checks.
constexpr std::chrono::microseconds kLooking{200}, kYielding{20000}, kSleeping{100};
constexpr int kLooksInTurn = 16;  // between reads of the clock
constexpr int64_t kAlignment = 4096, kLeastBytes = 1 << 16;  // of a place; of a thread's part of a copy
constexpr int64_t kMostRanks = 64;

template <class Value>
void add_places(const char* const* places, int64_t num_places, int64_t begin, int64_t end, Value* sums) {
  int64_t i = begin;
  const auto of = [&](int64_t place) { return reinterpret_cast<const Value*>(places[place]); };
  for (; i + kLanes <= end; i += kLanes) {
    Floats sum = load_floats(of(0) + i);
    for (int64_t place = 1; place < num_places; ++place) sum += load_floats(of(place) + i);
    store_floats(sum, sums + i);
  }
  for (; i < end; ++i) {
    float sum, value;
    read_floats(of(0) + i, 1, &sum);
    for (int64_t place = 1; place < num_places; ++place) {
      read_floats(of(place) + i, 1, &value);
      sum += value;
    }
    store_float(sum, sums + i);
  }
}

void copy(char* to, const char* from, int64_t bytes) {
  for_each_range(bytes, kLeastBytes, [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, end - begin); });
}

void check_exchanged(const Tensor& rows) {
  check_strided(rows, "rows", rows.dim());
  CHECK(rows.dim() > 0 && (rows.scalar_type() == kFloat || rows.scalar_type() == kBFloat16),
              "rows must be float32 or bfloat16");
}

}  // namespace

struct Exchange::Head {
  std::atomic<uint32_t> has_ended;
};

// A rank's progress: its step number and, in the lower half, the barriers passed in the step. Monotonic.
struct alignas(128) Exchange::Said {
  std::atomic<uint64_t> barrier;
};

Exchange::Exchange(int64_t file, int64_t rank, int64_t num_ranks, int64_t place_bytes)
    : rank_(rank), num_ranks_(num_ranks), place_bytes_(round_up(std::max<int64_t>(place_bytes, 1), kAlignment)) {
  CHECK(0 <= rank && rank < num_ranks && num_ranks <= kMostRanks && place_bytes <= int64_t(1) << 30,
              "there is no rank ", rank, " of ", num_ranks, " with places of ", place_bytes, " bytes");
  const int64_t heads = round_up(int64_t(sizeof(Said)) * (num_ranks + 1), kAlignment);
  file_bytes_ = heads + 2 * num_ranks * place_bytes_;
  CHECK(ftruncate(int(file), file_bytes_) == 0, "the file of the ranks cannot have ", file_bytes_, " bytes");
  void* memory = mmap(nullptr, file_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, int(file), 0);
  CHECK(memory != MAP_FAILED, "the file of the ranks cannot be mapped");
  memory_ = static_cast<char*>(memory);
  head_ = reinterpret_cast<Head*>(memory_);
  said_ = reinterpret_cast<Said*>(memory_ + sizeof(Said));
}

Exchange::~Exchange() { munmap(memory_, file_bytes_); }

void Exchange::begin(int64_t step) {
  CHECK(step >= int64_t(step_) && step < int64_t(1) << 32, "after step ", step_, " there is no step ", step);
  step_ = step;
  barrier_ = step_ << 32;
}

void Exchange::give_up() { said_[rank_].barrier.store((step_ + 1) << 32, std::memory_order_release); }

bool Exchange::is_given_up() const {
  for (int64_t rank = 0; rank < num_ranks_; ++rank)
    if (rank != rank_ && said_[rank].barrier.load(std::memory_order_acquire) >> 32 > step_) return true;
  return false;
}

void Exchange::end() { head_->has_ended.store(1, std::memory_order_release); }

char* Exchange::place(int64_t rank) const {
  const int64_t heads = file_bytes_ - 2 * num_ranks_ * place_bytes_;
  return memory_ + heads + ((barrier_ % 2) * num_ranks_ + rank) * place_bytes_;
}

void Exchange::wait_for_others() {
  said_[rank_].barrier.store(barrier_, std::memory_order_release);
  auto start = Clock::time_point::min();
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    for (int64_t looks = 1; rank != rank_; ++looks) {
      const uint64_t barrier = said_[rank].barrier.load(std::memory_order_acquire);
      CHECK(barrier >> 32 <= step_, "rank ", rank, " has given up step ", step_);
      if (barrier >= barrier_) break;
      if (looks % kLooksInTurn) {
        rest();
        continue;
      }
      CHECK(!head_->has_ended.load(std::memory_order_acquire), "a rank has ended");
      if (start == Clock::time_point::min()) start = Clock::now();
      const auto waited = Clock::now() - start;
      if (waited > kYielding)
        std::this_thread::sleep_for(kSleeping);
      else if (waited > kLooking)
        sched_yield();
    }
  }
}

Tensor Exchange::sum(const Tensor& given) {
  check_exchanged(given);
  const Tensor rows = given.contiguous();
  Tensor sums = empty(rows.sizes(), rows.scalar_type());
  const int64_t bytes = rows.nbytes(), size = rows.element_size();
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(sums.data_ptr());
  const char* places[kMostRanks];
  for (int64_t done = 0; done < bytes; done += place_bytes_) {
    const int64_t length = std::min(place_bytes_, bytes - done);
    ++barrier_;
    copy(place(rank_), from + done, length);
    wait_for_others();
    for (int64_t rank = 0; rank < num_ranks_; ++rank) places[rank] = place(rank);
    for_each_range(length / size, kLeastBytes / size, [&](int64_t begin, int64_t end) {
      if (rows.scalar_type() == kFloat)
        add_places(places, num_ranks_, begin, end, reinterpret_cast<float*>(to + done));
      else
        add_places(places, num_ranks_, begin, end, reinterpret_cast<bfloat16*>(to + done));
    });
  }
  return sums;
}

Tensor Exchange::gather(const Tensor& given) {
  check_exchanged(given);
  const Tensor rows = given.contiguous();
  std::vector<int64_t> sizes(rows.sizes().begin(), rows.sizes().end());
  sizes.back() *= num_ranks_;
  Tensor gathered = empty(sizes, rows.scalar_type());
  const int64_t row_bytes = rows.size(-1) * rows.element_size();
  if (row_bytes == 0) return gathered;
  CHECK(row_bytes <= place_bytes_, "a row of ", row_bytes, " bytes does not fit the places of the ranks");
  const int64_t num_rows = rows.nbytes() / row_bytes, rows_at_once = place_bytes_ / row_bytes;
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(gathered.data_ptr());
  for (int64_t done = 0; done < num_rows; done += rows_at_once) {
    const int64_t number = std::min(rows_at_once, num_rows - done);
    ++barrier_;
    copy(place(rank_), from + done * row_bytes, number * row_bytes);
    wait_for_others();
    for_each_item(number, [&](int64_t row) {
      for (int64_t rank = 0; rank < num_ranks_; ++rank)
        std::memcpy(to + ((done + row) * num_ranks_ + rank) * row_bytes, place(rank) + row * row_bytes, row_bytes);
    });
  }
  return gathered;
}

}  // namespace inflight
