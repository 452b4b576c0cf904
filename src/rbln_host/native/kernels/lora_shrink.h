// SPDX-License-Identifier: Apache-2.0
// lora_shrink: A x of each adapted part. Operands: x, slots, ranks, A of each part, output.
//
// Every number is one chain of multiply-adds, whatever rows are computed with it.
#pragma once

#include <algorithm>

#include "adapter_rows.h"
#include "tile.h"

namespace rbln {
namespace RBLN_ISA {

#if defined(__AVX512F__)
constexpr int kShrinkTile = 4;  // rows, and ranks, of a tile: 16 of 32 registers accumulate
#else
constexpr int kShrinkTile = 2;
#endif
constexpr int64_t kRanksPerTask = 16;

inline AdapterRows shrink_rows(const Call& call) { return {call[1], call[2]}; }

inline int64_t shrink_rank_tasks(const Call& call) {
  return (call[3].shape[1] + kRanksPerTask - 1) / kRanksPerTask;
}

inline int64_t lora_shrink_plan(const Call& call, Shared& shared, int) {
  const int64_t rows = in_use(call, shared, call[0].shape[0]);
  bool any = false;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = load_index(call[1], row);
    if (slot >= call[2].shape[1]) shared.fail(Fault::kAdapter, slot);
    any |= slot >= 0;
  }
  if (!any) return 0;
  return (rows + kShrinkTile - 1) / kShrinkTile * call.parts * shrink_rank_tasks(call);
}

// The dot products of MR rows of x with NR rows of A.
template <class T, int MR, int NR>
RBLN_INLINE void shrink_tile(const T* x, int64_t ldx, const T* a, int64_t k, float* out,
                             int64_t ldo) {
  Vec acc[MR][NR] = {};
  int64_t i = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto step = [&](auto load_pairs) {
      UVec columns[NR];
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) columns[n] = load_pairs(a + n * k + i);
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m) {
        const UVec row = load_pairs(x + m * ldx + i);
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) acc[m][n] = dot_pairs(acc[m][n], row, columns[n]);
      }
    };
    for (; i + 2 * kLanes <= k; i += 2 * kLanes) {
      step([](const T* p) {
        UVec v;
        std::memcpy(&v, p, sizeof(v));
        return v;
      });
    }
    if (i < k) {
      step([&](const T* p) {
        UVec v{};
        std::memcpy(&v, p, static_cast<size_t>(k - i) * sizeof(T));
        return v;
      });
      i = k;
    }
  }
#endif
  const auto step = [&](auto lanes) {
    Vec columns[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) columns[n] = load_some(a + n * k + i, lanes);
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) {
      const Vec row = load_some(x + m * ldx + i, lanes);
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) acc[m][n] += row * columns[n];
    }
  };
  for (; i + kLanes <= k; i += kLanes) step(AllLanes{});
  if (i < k) step(k - i);
  for (int m = 0; m < MR; ++m) {
    for (int n = 0; n < NR; ++n) out[m * ldo + n] = sum(acc[m][n]);
  }
}

// The same for numbers of rows and ranks known at run time, at most MR and NR.
template <class T, int MR, int NR>
RBLN_INLINE void shrink_some(int64_t rows, int64_t ranks, const T* x, int64_t ldx, const T* a,
                             int64_t k, float* out, int64_t ldo) {
  if constexpr (MR > 1) {
    if (rows < MR) return shrink_some<T, MR - 1, NR>(rows, ranks, x, ldx, a, k, out, ldo);
  }
  if constexpr (NR > 1) {
    if (ranks < NR) return shrink_some<T, MR, NR - 1>(rows, ranks, x, ldx, a, k, out, ldo);
  }
  shrink_tile<T, MR, NR>(x, ldx, a, k, out, ldo);
}

// A task: some rows, one part, some of its ranks.
template <class T>
void lora_shrink_task(const Call& call, const Shared& shared, int64_t task) {
  const Operand &x = call[0], &out = call[call.count - 1];
  const AdapterRows adapters = shrink_rows(call);
  const int64_t rank_tasks = shrink_rank_tasks(call), k = x.shape[1];
  const int64_t first = task % rank_tasks * kRanksPerTask;
  const int64_t part = task / rank_tasks % call.parts;
  const int64_t begin = task / rank_tasks / call.parts * kShrinkTile;
  const int64_t end = std::min(begin + kShrinkTile, in_use(call, shared, x.shape[0]));
  const Operand& a = call[3 + static_cast<int>(part)];
  const int64_t most = a.shape[1];
  for (int64_t row = begin; row < end;) {
    const int64_t next = adapters.same_until(row, end), slot = adapters.slot(row);
    const int64_t rank =
        std::min(adapters.rank(call.modules[part], slot, most), first + kRanksPerTask);
    for (int64_t r = first; r < rank; r += kShrinkTile) {
      shrink_some<T, kShrinkTile, kShrinkTile>(
          next - row, rank - r, x.as<T>() + row * x.stride[0], x.stride[0],
          a.as<T>() + (slot * most + r) * k, k,
          out.as<float>() + row * out.stride[0] + part * most + r, out.stride[0]);
    }
    row = next;
  }
}

inline void lora_shrink_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  with_float_type(call[0].dtype, [&](auto* type) {
    lora_shrink_task<std::remove_pointer_t<decltype(type)>>(call, shared, task);
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
