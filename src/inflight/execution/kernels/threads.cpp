#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace inflight {
namespace {

using Clock = std::chrono::steady_clock;
using Items = FunctionRef<void(int64_t)>;

// How long a thread spins before it sleeps. Waking takes some 50 µs on a virtual machine; steps of a small model are a
// millisecond apart.
constexpr auto kLookingForWork = std::chrono::microseconds(2000), kLookingForTheEnd = std::chrono::microseconds(200);
constexpr int kLooksInTurn = 8;  // between reads of the clock

// A futex.
class Signal {
 public:
  uint32_t load() const { return number_.load(); }
  void store(uint32_t number) { number_.store(number); }
  uint32_t add(uint32_t number) { return number_.fetch_add(number) + number; }
  void sleep_while(uint32_t number) { call(FUTEX_WAIT_PRIVATE, number); }
  void wake(int64_t num_threads) { call(FUTEX_WAKE_PRIVATE, uint32_t(std::min<int64_t>(num_threads, INT_MAX))); }

 private:
  void call(int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&number_), operation, value, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint32_t> number_{0};
};

template <class Condition>
bool look_for(std::chrono::microseconds time, const Condition& has_come) {
  const auto end = Clock::now() + time;
  do {
    for (int i = 0; i < kLooksInTurn; ++i, rest())
      if (has_come()) return true;
  } while (Clock::now() < end);
  return false;
}

class Pool {
 public:
  // Returns false if another caller has the threads. `own`: this thread's work instead of items; items not begun when
  // it ends are dropped.
  bool run(int64_t num_items, int64_t num_threads, Items work, const FunctionRef<void()>* own = nullptr) {
    const std::unique_lock lock(user_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    resize(num_threads - 1);
    work_ = &work;
    num_items_ = num_items;
    num_unfinished_.store(uint32_t(num_items));
    num_unclaimed_.store(num_items);
    num_jobs_.add(1);
    if (num_sleeping_.load() > 0) num_jobs_.wake(std::min(num_threads - 1, num_items));
    if (own) {
      attempt(*own);
      const int64_t num_dropped = std::max<int64_t>(0, num_unclaimed_.exchange(0));
      num_unfinished_.add(uint32_t(-num_dropped));
    } else {
      help();
    }
    wait_for_the_end();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return true;
  }

  // Whether this thread is at work.
  static bool is_inside() { return is_inside_; }

 private:
  // A thread late for one job may already work for the next: its claim keeps that open.
  void help() {
    uint32_t num_done = 0;
    for (int64_t left; num_unclaimed_.load() > 0 && (left = num_unclaimed_.fetch_sub(1)) > 0; ++num_done)
      attempt([&] { (*work_)(num_items_ - left); });
    if (num_done > 0 && num_unfinished_.add(-num_done) == 0 && is_waited_for_.load()) num_unfinished_.wake(1);
  }

  template <class Function>
  void attempt(const Function& function) {
    is_inside_ = true;
    try {
      function();
    } catch (...) {
      const std::lock_guard lock(error_lock_);
      if (!error_) error_ = std::current_exception();
    }
    is_inside_ = false;
  }

  void wait_for_the_end() {
    if (look_for(kLookingForTheEnd, [&] { return num_unfinished_.load() == 0; })) return;
    is_waited_for_.store(true);
    for (uint32_t number; (number = num_unfinished_.load()) > 0;) num_unfinished_.sleep_while(number);
    is_waited_for_.store(false);
  }

  void serve(size_t number) {
    pthread_setname_np(pthread_self(), "inflight");
    torch->begin_thread();
    for (uint32_t job; job = num_jobs_.load(), number < num_wanted_.load();) {
      help();
      if (look_for(kLookingForWork, [&] { return num_jobs_.load() != job; })) continue;
      num_sleeping_.fetch_add(1);
      while (num_jobs_.load() == job) num_jobs_.sleep_while(job);
      num_sleeping_.fetch_sub(1);
    }
  }

  void resize(size_t num_workers) {
    if (num_workers == workers_.size()) return;
    num_wanted_.store(num_workers);
    if (num_workers < workers_.size() && process_ == getpid()) {  // a forked child has none of them
      num_jobs_.add(1);
      num_jobs_.wake(INT_MAX);
      for (size_t number = num_workers; number < workers_.size(); ++number) workers_[number].join();
      workers_.resize(num_workers);
    }
    while (workers_.size() < num_workers) workers_.emplace_back([this, number = workers_.size()] { serve(number); });
  }

  static inline thread_local bool is_inside_ = false;

  const pid_t process_ = getpid();
  std::mutex user_, error_lock_;
  std::vector<std::thread> workers_;
  std::atomic<size_t> num_wanted_{0};
  const Items* work_ = nullptr;
  int64_t num_items_ = 0;
  std::exception_ptr error_;
  Signal num_jobs_, num_unfinished_;
  alignas(64) std::atomic<int64_t> num_unclaimed_{0};  // below zero after the last
  alignas(64) std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_waited_for_{false};
};

Pool& pool() {
  static Pool& pool = *new Pool;  // never deleted: its threads may outlive statics
  return pool;
}

thread_local int64_t num_own_threads = 0;

// Calls function(begin, end) for ranges that together are [0, size), on torch's threads.
void run_ranges(int64_t size, FunctionRef<void(int64_t, int64_t)> function) {
  struct Job {
    FunctionRef<void(int64_t, int64_t)> function;
    std::mutex mutex;
    std::exception_ptr error;
  } job{function, {}, {}};
  torch->parallel_for(size, [](void* data, int64_t begin, int64_t end) {
    Job& job = *static_cast<Job*>(data);
    try {
      job.function(begin, end);
    } catch (...) {
      const std::lock_guard lock(job.mutex);
      if (!job.error) job.error = std::current_exception();
    }
  }, &job);
  if (job.error) std::rethrow_exception(job.error);
}

void run_on_torch(int64_t num_items, int64_t num_threads, Items work) {
  std::atomic<int64_t> next{0};
  run_ranges(std::min(num_threads, num_items), [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread)
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) work(item);
  });
}

}  // namespace

void use_own_threads(int64_t number) {
  CHECK(number >= 0 && number <= 1 << 16, "there cannot be ", number, " threads");
  num_own_threads = number;
}

bool uses_own_threads() { return num_own_threads > 0; }

int64_t thread_count() { return num_own_threads > 0 ? num_own_threads : torch->num_threads(); }

void run_items(int64_t num_items, int64_t num_threads, Items work) {
  const bool is_shared = num_items > 1 && num_items < INT_MAX && num_threads > 1 && !Pool::is_inside();
  if (is_shared && !uses_own_threads()) return run_on_torch(num_items, num_threads, work);
  if (is_shared && pool().run(num_items, num_threads, work)) return;
  for (int64_t item = 0; item < num_items; ++item) work(item);
}

void run_helped(int64_t num_threads, FunctionRef<void()> work, Items help) {
  const bool is_shared = num_threads > 1 && !Pool::is_inside();
  if (is_shared && !uses_own_threads())
    return run_ranges(num_threads, [&](int64_t begin, int64_t) { begin == 0 ? work() : help(begin - 1); });
  if (is_shared && pool().run(num_threads - 1, num_threads, help, &work)) return;
  work();
}

}  // namespace inflight
