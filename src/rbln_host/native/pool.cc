// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <new>

namespace rbln {
namespace {

using Clock = std::chrono::steady_clock;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr,
          nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr,
          nullptr, 0);
}

bool pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return sched_setaffinity(0, sizeof(set), &set) == 0;
}

// Keeps the calling thread on one CPU for the length of a run, so that it does not share a core
// with a pinned worker, and gives it its freedom back afterwards.
class PinnedCaller {
 public:
  PinnedCaller(int cpu, bool needed) {
    active_ = needed && sched_getaffinity(0, sizeof(before_), &before_) == 0 && pin(cpu);
  }
  ~PinnedCaller() {
    if (active_) sched_setaffinity(0, sizeof(before_), &before_);
  }
  PinnedCaller(const PinnedCaller&) = delete;
  PinnedCaller& operator=(const PinnedCaller&) = delete;

 private:
  cpu_set_t before_;
  bool active_;
};

}  // namespace

Pool::Pool(std::vector<int> cpus, int spin_us)
    : cpus_(std::move(cpus)), spin_us_(spin_us), process_(getpid()), scratch_(cpus_.size()) {
  try {
    for (int index = 1; index < threads(); ++index) {
      workers_.emplace_back([this, index] { thread_main(index); });
    }
  } catch (...) {  // the system gives no more threads
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  if (getpid() != process_) {
    // A fork's copy: the threads are the parent's, so they can be neither joined nor detached.
    (void)new std::vector<std::thread>(std::move(workers_));
    return;
  }
  stop_.store(true);
  generation_.fetch_add(1);
  futex_wake_all(generation_);
  for (auto& worker : workers_) worker.join();
}

std::pair<Fault, int64_t> Pool::run(const std::vector<Work>& work, size_t scratch_bytes,
                                    int64_t tokens) {
  if (work.empty()) return {Fault::kNone, 0};
  std::lock_guard<std::mutex> lock(one_run_);
  for (auto& scratch : scratch_) scratch.reserve(scratch_bytes + 64);
  shared_.fault.store(0);
  shared_.tokens = tokens;
  PinnedCaller pinned(cpus_[0], threads() > 1);
  work_ = &work;
  runs_ = (runs_ + 1) & 0xffff;
  start(runs_, 0);
  work_until_over(runs_);
  return {static_cast<Fault>(shared_.fault.load()), shared_.fault_value.load()};
}

// Opens a command: counts its tasks and lets threads take them. A command without tasks is skipped.
void Pool::start(uint64_t run, size_t command) {
  for (; command < work_->size(); ++command) {
    const Work& next = (*work_)[command];
    const int64_t tasks = plan(next);
    if (tasks == 0) continue;
    tasks_.store(static_cast<uint32_t>(tasks), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    publish(run << kRunShift | command << kCommandShift | static_cast<uint32_t>(tasks));
    return;
  }
  publish(run << kRunShift | kOver << kCommandShift);
}

// The number of tasks of a command. Without memory for a plan it is skipped, and that is a fault:
// this may be a thread that nobody catches exceptions of.
int64_t Pool::plan(const Work& work) {
  try {
    return work.kernel->plan(*work.call, shared_, threads());
  } catch (const std::bad_alloc&) {
    shared_.fail(Fault::kMemory, 0);
    return 0;
  }
}

void Pool::publish(uint64_t ticket) {
  ticket_.store(ticket);
  generation_.fetch_add(1);
  if (sleepers_.load() > 0) futex_wake_all(generation_);
}

void Pool::work_until_over(uint64_t run) {
  const uint64_t over = run << kRunShift | kOver << kCommandShift;
  for (;;) {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (ticket >> kCommandShift == over >> kCommandShift) return;
    if (!take_and_run(ticket, 0)) wait_for_change(ticket);
  }
}

// Takes a task of the ticket's command and runs it. False when the command has none left to take.
bool Pool::take_and_run(uint64_t ticket, int thread) {
  const uint32_t left = static_cast<uint32_t>(ticket);
  if (left == 0) return false;
  if (!ticket_.compare_exchange_strong(ticket, ticket - 1, std::memory_order_acq_rel)) return true;
  // The exchange succeeded, so the command is open and stays so until this task is done. Only now
  // is the count of tasks known to be this command's: `start` sets it before it publishes the next.
  const uint32_t tasks = tasks_.load(std::memory_order_relaxed);
  const uint32_t task = tasks - left;
  const size_t command = (ticket >> kCommandShift) & 0xffff;
  const Work& work = (*work_)[command];
  work.kernel->run(*work.call, shared_, task, scratch_[thread].data());
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
    start(ticket >> kRunShift, command + 1);
  }
  return true;
}

// Waits until the ticket's command (not merely its next task) is another.
void Pool::wait_for_change(uint64_t seen) {
  const auto changed = [&] {
    return (ticket_.load(std::memory_order_acquire) ^ seen) >> kCommandShift != 0;
  };
  const auto deadline = Clock::now() + std::chrono::microseconds(spin_us_);
  do {
    for (int i = 0; i < 32; ++i) {
      if (changed()) return;
      relax();
    }
  } while (Clock::now() < deadline);
  const uint32_t generation = generation_.load();
  sleepers_.fetch_add(1);
  if (!changed() && !stop_.load()) futex_wait(generation_, generation);
  sleepers_.fetch_sub(1);
}

void Pool::thread_main(int index) {
  pthread_setname_np(pthread_self(), "rbln-worker");
  pin(cpus_[index]);
  while (!stop_.load()) {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    const bool over = ((ticket >> kCommandShift) & 0xffff) == kOver;
    if (over || !take_and_run(ticket, index)) wait_for_change(ticket);
  }
}

}  // namespace rbln
