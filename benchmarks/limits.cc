// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most: reading memory, and multiplying matrices of bf16.
//
// usage: limits CPU...          one pinned thread per CPU named
// Prints one JSON object: read_gb_s, matrix_gflop_s, matrix_kind, threads. Each figure is the best
// of several trials, since a limit that other work disturbs is too low, never too high.

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using Words = uint64_t __attribute__((vector_size(64)));

constexpr size_t kBufferBytes = size_t{512} << 20;  // far beyond any L3 of a few cores
constexpr int kTrials = 30;  // short ones: on a shared machine some of them run undisturbed
constexpr int kMaxStreams = 4;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Runs `work(thread)` on all CPUs at once; returns the seconds from the common start to the last
// end.
double run_on_all(const std::vector<int>& cpus, const std::function<void(int)>& work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < cpus.size(); ++i) {
    threads.emplace_back([&, i] {
      pin(cpus[i]);
      ready.fetch_add(1);
      while (!go.load()) sched_yield();
      work(static_cast<int>(i));
    });
  }
  while (ready.load() != static_cast<int>(cpus.size())) sched_yield();
  const Clock::time_point start = Clock::now();
  go.store(true);
  for (std::thread& thread : threads) thread.join();
  return seconds_since(start);
}

// Adds `count` words read as `streams` sequences side by side: hardware prefetchers follow
// each, and which number of them is fastest depends on the machine. Returns one lane of the sum.
uint64_t sum(const Words* data, size_t count, int streams) {
  const size_t length = count / streams;
  Words total[kMaxStreams] = {};
  for (size_t i = 0; i + 4 <= length; i += 4) {
    for (int s = 0; s < streams; ++s) {
      const Words* p = data + s * length + i;
      total[s] += (p[0] + p[1]) + (p[2] + p[3]);
    }
  }
  Words all = {};
  for (const Words& one : total) all += one;
  return all[0];
}

double read_gb_s(const std::vector<int>& cpus) {
  void* memory =
      mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0;
  madvise(memory, kBufferBytes, MADV_HUGEPAGE);
  const size_t words = kBufferBytes / sizeof(Words) / cpus.size();
  Words* data = static_cast<Words*>(memory);
  // Each thread writes what it reads later, so that pages lie near it.
  run_on_all(cpus, [&](int t) {
    for (size_t i = 0; i < words; ++i) data[t * words + i] = Words{} + i;
  });
  double best = 0;
  volatile uint64_t sink = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const int streams = 1 << trial % 3;
    const double took =
        run_on_all(cpus, [&](int t) { sink = sink + sum(data + t * words, words, streams); });
    best = std::max(best, words * cpus.size() * sizeof(Words) / took / 1e9);
  }
  munmap(memory, kBufferBytes);
  return best;
}

constexpr int kRows = 6, kColumns = 4, kDepth = 64;  // 24 sums in registers; operands fit in L1
constexpr int kRepeats = 40000;

#if defined(__AVX512BF16__)
constexpr const char* kMatrixKind = "bf16 (vdpbf16ps)";
constexpr double kFlopPerVector = 64;  // 16 lanes, 2 products and 2 sums each

float multiply() {
  alignas(64) static thread_local uint16_t a[kDepth * kRows * 2];
  alignas(64) static thread_local uint16_t b[kDepth * kColumns * 32];
  for (uint16_t& x : a) x = 0x3f80;
  for (uint16_t& x : b) x = 0x3c00;
  __m512 sums[kRows][kColumns] = {};
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (int k = 0; k < kDepth; ++k) {
      __m512bh column[kColumns];
      for (int j = 0; j < kColumns; ++j) {
        column[j] = (__m512bh)_mm512_load_si512(b + (k * kColumns + j) * 32);
      }
      for (int i = 0; i < kRows; ++i) {
        int pair;
        __builtin_memcpy(&pair, a + (k * kRows + i) * 2, sizeof pair);
        const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
        for (int j = 0; j < kColumns; ++j) {
          sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, column[j]);
        }
      }
    }
    asm volatile("" ::: "memory");  // the operands are read again each time
  }
  float total = 0;
  for (auto& row : sums) {
    for (__m512 one : row) total += one[0];
  }
  return total;
}
#else
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kFp32Rows = 6, kFp32Columns = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kFp32Rows = 6, kFp32Columns = 2;  // 16 registers
#else
constexpr int kLanes = 4;
constexpr int kFp32Rows = 4, kFp32Columns = 2;
#endif
constexpr const char* kMatrixKind = "fp32 (multiply-add)";
constexpr double kFlopPerVector = 2.0 * kLanes * kFp32Rows * kFp32Columns / (kRows * kColumns);
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));

float multiply() {
  alignas(64) static thread_local float a[kDepth * kFp32Rows];
  alignas(64) static thread_local Floats b[kDepth * kFp32Columns];
  for (float& x : a) x = 1.0F;
  for (Floats& x : b) x = Floats{} + 0.01F;
  Floats sums[kFp32Rows][kFp32Columns] = {};
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (int k = 0; k < kDepth; ++k) {
      for (int i = 0; i < kFp32Rows; ++i) {
        for (int j = 0; j < kFp32Columns; ++j) {
          sums[i][j] += a[k * kFp32Rows + i] * b[k * kFp32Columns + j];
        }
      }
    }
    asm volatile("" ::: "memory");
  }
  float total = 0;
  for (auto& row : sums) {
    for (const Floats& one : row) total += one[0];
  }
  return total;
}
#endif

double matrix_gflop_s(const std::vector<int>& cpus) {
  const double flop = kFlopPerVector * kRows * kColumns * kDepth * kRepeats * cpus.size();
  double best = 0;
  volatile float sink = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const double took = run_on_all(cpus, [&](int) { sink = multiply(); });
    best = std::max(best, flop / took / 1e9);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> cpus;
  for (int i = 1; i < argc; ++i) cpus.push_back(std::atoi(argv[i]));
  if (cpus.empty()) {
    std::fprintf(stderr, "usage: limits CPU...\n");
    return 2;
  }
  const double bandwidth = read_gb_s(cpus);
  if (bandwidth == 0) {
    std::fprintf(stderr, "limits: no memory for a buffer of %zu bytes\n", kBufferBytes);
    return 1;
  }
  std::printf(
      "{\"read_gb_s\": %.2f, \"matrix_gflop_s\": %.1f, \"matrix_kind\": \"%s\", \"threads\": "
      "%zu}\n",
      bandwidth, matrix_gflop_s(cpus), kMatrixKind, cpus.size());
}
