// The interface between the kernels and the bridge to torch (torch_bridge.cpp), in plain C: the kernels are built for a
// CPU and the bridge for a version of torch, perhaps by different compilers. Functions that may fail return a message,
// or null, valid until the same thread's next call.
#pragma once

#include <stdint.h>

#include "program_format.h"

extern "C" {

enum { kInflightMaxDims = 16 };

// Of memory.
enum {
  kInflightIsDense = 1,   // strided, on the CPU; the memory of others has no address
  kInflightIsLazy = 2,    // a view that is conjugated or negated when it is read
  kInflightIsReused = 4,  // the kernels' own: no tensor of torch's has its dtype
  kInflightIsOnCpu = 8,
  kInflightIsWhole = 16,  // an operator of torch's gets the tensor that has it, not a view
};

struct InflightMemory {
  void* owner;  // a reference to torch's tensor that has it; null: there is none
  char* begin;
  int64_t num_bytes;
  int32_t dtype, item_size;  // torch's number of it
  int32_t flags, padding;
};

struct InflightTensor {
  struct InflightMemory memory;
  char* data;  // of the first element
  int64_t num_dims;
  int64_t sizes[kInflightMaxDims], strides[kInflightMaxDims];  // in elements
};

// An argument or a result. Results have tensors only, or an integer; the references are the caller's from then on, and
// what they lie in is valid until the thread's next call.
struct InflightValue {
  int64_t kind;  // a `ValueKind`
  int64_t integer;    // or a flag, or a dtype; of tensors, lists and words how many `items` there are
  double number;
  const void* items;  // int64_t, double, char, `InflightTensor`, or of words `InflightValue`
};

// An operator of ours. `schema` is torch's notation.
struct InflightOperator {
  const char* schema;
  int32_t is_for_cpu;  // it runs for tensors on the CPU; else for any arguments
  int32_t num_arguments;
  void (*run)(const struct InflightValue* arguments, struct InflightValue* result);
};

// An argument of an operator in a program, as far as it is known before any step.
struct InflightArgument {
  struct InflightValue value;
  int64_t is_fixed;  // whether an integer is the same in every step
};

// How an operator of torch's is called.
enum {
  kInflightAlone = 1,    // without torch's threads
  kInflightInferring = 2,  // on a thread that is not in inference mode itself
};

// Functions of torch for the kernels.
struct InflightTorch {
  void (*retain)(void* owner);
  void (*release)(void* owner);
  int32_t (*is_shared)(void* owner);  // whether there are other references to it, or to its memory
  const char* (*empty)(const int64_t* sizes, int64_t num_dims, int32_t dtype, struct InflightTensor* tensor);
  const char* (*view)(const struct InflightTensor* tensor, struct InflightTensor* view);  // with an owner of its own

  int64_t (*num_threads)();
  void (*begin_thread)();  // on a thread of the kernels', before anything else
  // Calls `work(data, begin, end)` for ranges that together are [0, size), on torch's threads.
  void (*parallel_for)(int64_t size, void (*work)(void* data, int64_t begin, int64_t end), void* data);

  void* (*begin_range)(const char* name);  // for torch's profiler; null: it does not listen
  void (*end_range)(void* range);

  const char* (*new_operator)(const char* name, const char* overload, const struct InflightArgument* arguments,
                              int64_t num_arguments, void** made);
  void (*delete_operator)(void* made);
  // Reads the `values` that vary between steps. In lists, tensors without an owner are None.
  const char* (*call_operator)(void* made, const struct InflightValue* values, int32_t how, struct InflightValue* result);
};

// The exports of a library of kernels.
struct InflightKernels {
  const struct InflightOperator* operators;
  int64_t num_operators;
  const char* (*run)(const struct InflightOperator* operator_, const struct InflightValue* arguments,
                     struct InflightValue* result);
};

// Of a library of kernels, under the name `inflight_kernels`.
typedef const struct InflightKernels* InflightConnect(const struct InflightTorch* torch);
}
