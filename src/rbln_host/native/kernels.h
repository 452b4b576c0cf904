// SPDX-License-Identifier: Apache-2.0
// What an instruction set offers: for every operator, how a call splits into tasks and runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "types.h"

namespace rbln {

// Memory aligned to cache lines that only grows.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    reserve(count * sizeof(T));
    return reinterpret_cast<T*>(data_.get());
  }
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    size_ = (bytes + 4095) / 4096 * 4096;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, size_)));
    if (!data_) {
      size_ = 0;
      throw std::bad_alloc();
    }
  }
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

// A piece of attention work: keys [first, end) for query row `row` (or query block) and one KV
// head.
struct AttentionItem {
  int32_t row;
  int32_t head;
  int32_t part;
  int32_t parts;
  int32_t slot;  // index of this (row, head) among all, for partial results
  int32_t first_query;
  int32_t queries;
};

// The rows of one expert: places [start, end).
struct ExpertSpan {
  int32_t expert;
  int32_t start;
  int32_t end;
};

// The rows of a step by expert. A place is token * choices + choice.
struct ExpertRows {
  std::vector<int32_t> places;
  std::vector<ExpertSpan> used;  // experts that have rows, by their numbers
  std::vector<int32_t> next;     // while sorting: counts, then where the next row goes
};

// State of one run that all threads share. Written by a command's `plan`, alone, before its tasks.
struct Shared {
  std::vector<AttentionItem> items;
  ExpertRows experts;
  int threads = 1;
  int64_t tokens = INT64_MAX;  // tokens in use; the rows of others need not be computed
  Scratch partials;
  std::unique_ptr<std::atomic<int>[]> finished;  // partial results so far, per (row, head)
  size_t finished_size = 0;
  std::atomic<int> fault{0};
  std::atomic<int64_t> fault_value{0};

  void fail(Fault kind, int64_t value) {
    int none = 0;
    if (fault.compare_exchange_strong(none, static_cast<int>(kind))) fault_value.store(value);
  }
};

// How many entries of axis 0, which has `size`, a call must compute.
inline int64_t in_use(const Call& call, const Shared& shared, int64_t size) {
  return call.by_token && shared.tokens < size ? shared.tokens : size;
}

struct Kernel {
  // Number of tasks; called by one thread before the tasks run.
  int64_t (*plan)(const Call&, Shared&, int threads);
  // Runs one task. Tasks of a call may run in any order on any thread.
  void (*run)(const Call&, Shared&, int64_t task, std::byte* scratch);
  // Bytes of scratch a task needs.
  size_t (*scratch)(const Call&);
};

using KernelTable = const Kernel*;  // indexed by Op

KernelTable kernels_portable();
KernelTable kernels_avx2();
KernelTable kernels_avx512();
KernelTable kernels_avx512_bf16();

}  // namespace rbln
