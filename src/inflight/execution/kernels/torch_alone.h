// Torch's operators without torch's threads: to wake these takes longer than what small operators do, and then they look
// for more work for a while, on cores that ours want.
#pragma once

#include <omp.h>

// MKL's, in a torch that has it, which wakes torch's threads even for two hundred cosines.
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int number);

namespace inflight {

// While there is one, torch's operators run on the calling thread alone.
class TorchAlone {
 public:
  TorchAlone() : omp_(omp_get_max_threads()), mkl_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {
    omp_set_num_threads(1);
  }
  ~TorchAlone() {
    omp_set_num_threads(omp_);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl_);
  }
  TorchAlone(const TorchAlone&) = delete;
  TorchAlone& operator=(const TorchAlone&) = delete;

 private:
  int omp_, mkl_;
};

}  // namespace inflight
