// Prints the seconds that a sum of two ranks' values takes through shared memory, of as many float32 as the argument
// says. The ranks are processes on the first two cores that this one may use. Each writes its values and says so; when the
// other has said so, it adds both in the order of the ranks. Two sets of places take turns, so that nobody overwrites what
// the other may still read.

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int NUM_ROUNDS = 20000;

struct alignas(128) Said {
  std::atomic<int> round;
};

int main(int, char** arguments) {
  const size_t num_values = std::atol(arguments[1]);
  const size_t bytes = 4096 + 4 * num_values * sizeof(float);
  char* memory = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED) return 1;
  Said* said = reinterpret_cast<Said*>(memory);
  float* places = reinterpret_cast<float*>(memory + 4096);
  cpu_set_t usable;
  sched_getaffinity(0, sizeof(usable), &usable);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &usable)) cpus.push_back(cpu);
  }
  if (cpus.size() < 2) return 2;
  const int rank = fork() == 0;
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(cpus[rank], &own);
  sched_setaffinity(0, sizeof(own), &own);
  std::vector<float> values(num_values, 1.0f), sums(num_values);
  auto start = std::chrono::steady_clock::now();
  const int num_rounds = num_values > 100000 ? NUM_ROUNDS / 20 : NUM_ROUNDS;
  for (int round = 1; round <= num_rounds; ++round) {
    if (round == num_rounds / 10) start = std::chrono::steady_clock::now();
    float* both = places + (round % 2) * 2 * num_values;
    float* mine = both + rank * num_values;
    for (size_t i = 0; i < num_values; ++i) mine[i] = values[i];
    said[rank].round.store(round, std::memory_order_release);
    while (said[1 - rank].round.load(std::memory_order_acquire) < round) __builtin_ia32_pause();
    const float *first = both, *second = both + num_values;
    for (size_t i = 0; i < num_values; ++i) sums[i] = first[i] + second[i];
    values[round % num_values] = sums[(round * 7) % num_values] * 0.5f;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (rank == 1) return 0;
  wait(nullptr);
  std::printf("%.9g\n", took.count() / (num_rounds - num_rounds / 10));
  return 0;
}
