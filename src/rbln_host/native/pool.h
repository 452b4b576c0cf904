// SPDX-License-Identifier: Apache-2.0
// Threads that run a program's commands one after another, each split into tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace rbln {

struct Work {
  const Kernel* kernel;
  const Call* call;
};

// A pool of threads, one per CPU. The caller of `run` is one of them.
//
// There is no barrier that waits for threads. A command is over when its tasks are; a thread that
// the system has put aside and that holds no task is not waited for, so two pools on the same cores
// share them. Waiting threads spin for a moment, then sleep.
//
// After a fork the child has a pool without threads: it runs all tasks itself, unless the pool was
// running at that moment. A child had better make its own.
class Pool {
 public:
  Pool(std::vector<int> cpus, int spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(cpus_.size()); }

  // Runs the commands in order. `scratch_bytes` is what the largest task needs.
  // Of calls by token only the first `tokens` rows are computed.
  // Returns the first fault and the value that caused it.
  std::pair<Fault, int64_t> run(const std::vector<Work>& work, size_t scratch_bytes,
                                int64_t tokens);

 private:
  // A ticket is (run, command, tasks left to take): 16, 16 and 32 bits. Taking a task is a
  // compare-exchange on the whole, so a thread that was put aside cannot take one of another
  // command by mistake; and a command without tasks left is seen to be so from the ticket alone.
  static constexpr uint64_t kCommandShift = 32;
  static constexpr uint64_t kRunShift = 48;
  static constexpr uint64_t kOver = 0xffff;

  void work_until_over(uint64_t run);
  bool take_and_run(uint64_t ticket, int thread);
  void start(uint64_t run, size_t command);
  int64_t plan(const Work& work);
  void wait_for_change(uint64_t seen);
  void publish(uint64_t ticket);
  void thread_main(int index);
  void stop();

  std::vector<int> cpus_;
  int spin_us_;
  int process_;  // that has the threads
  std::vector<Scratch> scratch_;
  Shared shared_;
  const std::vector<Work>* work_ = nullptr;
  std::mutex one_run_;
  uint64_t runs_ = 0;

  alignas(64) std::atomic<uint64_t> ticket_{kOver << kCommandShift};
  std::atomic<uint32_t> tasks_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace rbln
