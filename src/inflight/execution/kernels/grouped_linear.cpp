#include "grouped_linear.h"

namespace inflight {

bool prefers_whole_numbers() {
#ifdef __AVX2__
  return true;
#else
  return false;  // with NEON never measured
#endif
}

void run_grouped(const Linear& linear, const Tensor& x, const Additions& additions, Tensor& output) {
  const auto dtype = x.scalar_type();
  CHECK(dtype == kFloat || dtype == kBFloat16, "activations cannot be ", dtype);
  const bool is_exact = linear.is_exact || linear.grouped->code == Code::kE4M3 || !multiplies_whole_numbers();
  is_exact ? run_exact(linear, x, additions, output) : run_in_whole_numbers(linear, x, additions, output);
}

}  // namespace inflight
