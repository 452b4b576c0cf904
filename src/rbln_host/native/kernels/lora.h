// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters: lora_shrink (A x), and what linears add for them (B times that).
//
// Each row names the slot of its adapter. A row without one costs nothing and gets nothing, not
// even a zero: the rest of its linear is computed as without adapters. Every number is one chain of
// multiply-adds, whatever rows are computed with it.
#pragma once

#include <algorithm>

#include "rows.h"
#include "tile.h"

namespace rbln {
namespace RBLN_ISA {

#if defined(__AVX512F__)
constexpr int kShrinkTile = 4;  // rows, and ranks, of a tile: 16 of 32 registers accumulate
#else
constexpr int kShrinkTile = 2;
#endif
constexpr int kExpandRows = 4;
constexpr int64_t kRanksPerTask = 16;

// Slots and ranks of a call's rows. A slot is data: one that does not exist counts as none here,
// and lora_shrink, which comes first, reports it.
struct AdapterRows {
  const Operand& slots;
  const Operand& ranks;

  // The slot of a row's adapter; -1 for none.
  int64_t slot(int64_t row) const {
    const int64_t slot = load_index(slots, row);
    return slot < ranks.shape[1] ? std::max<int64_t>(slot, -1) : -1;
  }
  // How many of `most` ranks the adapter in a slot has in a module.
  int64_t rank(int64_t module, int64_t slot, int64_t most) const {
    if (slot < 0) return 0;
    const int64_t at = module * ranks.stride[0] + slot * ranks.stride[1];
    const int64_t rank =
        ranks.dtype == DType::kInt64 ? ranks.as<int64_t>()[at] : ranks.as<int32_t>()[at];
    return std::clamp<int64_t>(rank, 0, most);
  }
  // The end of the rows from `row` on, before `end`, that have its slot.
  int64_t same_until(int64_t row, int64_t end) const {
    const int64_t first = slot(row);
    int64_t next = row + 1;
    while (next < end && slot(next) == first) ++next;
    return next;
  }
};

// ---- lora_shrink: x, slots, ranks, A of each part, output

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

// ---- in linears: shrunk, slots, ranks, B of each part, before the output

inline bool has_adapters(const Call& call) {
  return call.op == Op::kLoraLinear || call.op == Op::kLoraGatedLinear;
}

struct Expansion {
  const Call& call;
  int first;  // place of the first of the operands

  explicit Expansion(const Call& c) : call(c), first(c.count - 4 - static_cast<int>(c.parts)) {}
  const Operand& shrunk() const { return call[first]; }
  AdapterRows rows() const { return {call[first + 1], call[first + 2]}; }
  const Operand& b(int64_t part) const { return call[first + 3 + static_cast<int>(part)]; }
  // What lora_shrink made of a row for a part, and floats from row to row.
  const float* shrunk_row(int64_t part, int64_t row) const {
    return shrunk().as<float>() + row * shrunk().stride[0] + part * b(part).shape[2];
  }
  int64_t shrunk_stride() const { return shrunk().stride[0]; }
  // A slot's group of 16 features of a part.
  template <class T>
  const T* group(int64_t part, int64_t slot, int64_t group) const {
    const Operand& of = b(part);
    return of.as<T>() + (slot * of.shape[1] + group) * of.shape[2] * kLanes;
  }
};

// Some groups of 16 columns that follow each other, in a tile of finished sums: `c` is their first
// column in the first row, `columns` the weight's columns in all.
struct TileColumns {
  float* c;
  int64_t ldc, column, columns;
};

// c[m] += B . shrunk[m] for MR rows with one adapter and NG groups; each group is `step` elements.
template <class T, int MR, int NG>
RBLN_INLINE void expand_tile(const T* b, int64_t step, int64_t rank, const float* shrunk,
                             int64_t lds, float* c, int64_t ldc) {
  Vec acc[MR][NG] = {};
  for (int64_t r = 0; r < rank; ++r) {
    Vec features[NG];
#pragma GCC unroll 4
    for (int n = 0; n < NG; ++n) features[n] = load(b + n * step + r * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) {
      const Vec x = splat(shrunk[m * lds + r]);
#pragma GCC unroll 4
      for (int n = 0; n < NG; ++n) acc[m][n] += x * features[n];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < NG; ++n) {
      float* at = c + m * ldc + n * kLanes;
      store(at, load(at) + acc[m][n]);
    }
  }
}

template <class T, int NG, int MR = kExpandRows>
RBLN_INLINE void expand_rows(int64_t rows, const T* b, int64_t step, int64_t rank,
                             const float* shrunk, int64_t lds, float* c, int64_t ldc) {
  if constexpr (MR > 1) {
    if (rows < MR) return expand_rows<T, NG, MR - 1>(rows, b, step, rank, shrunk, lds, c, ldc);
  }
  expand_tile<T, MR, NG>(b, step, rank, shrunk, lds, c, ldc);
}

// Columns that are whole groups of a part.
template <class T, int NG>
void expand_groups(const Expansion& e, int64_t part, const TileColumns& to, int rows,
                   int64_t first_row) {
  const AdapterRows adapters = e.rows();
  const int64_t module = e.call.modules[part], most = e.b(part).shape[2];
  const int64_t group = (to.column - e.call.starts[part]) / kLanes, end = first_row + rows;
  for (int64_t row = first_row; row < end;) {
    const int64_t slot = adapters.slot(row);
    const int64_t next = adapters.same_until(row, std::min(row + kExpandRows, end));
    const int64_t rank = adapters.rank(module, slot, most);
    if (rank > 0) {
      expand_rows<T, NG>(next - row, e.group<T>(part, slot, group), most * kLanes, rank,
                         e.shrunk_row(part, row), e.shrunk_stride(),
                         to.c + (row - first_row) * to.ldc, to.ldc);
    }
    row = next;
  }
}

// One column, where a part's features do not lie in the groups of the weight's columns.
template <class T>
void expand_column(const Expansion& e, int64_t part, int64_t feature, float* c, int64_t ldc,
                   int rows, int64_t first_row) {
  const int64_t most = e.b(part).shape[2];
  for (int m = 0; m < rows; ++m) {
    const int64_t slot = e.rows().slot(first_row + m);
    const int64_t rank = e.rows().rank(e.call.modules[part], slot, most);
    if (rank == 0) continue;
    const T* b = e.group<T>(part, slot, feature / kLanes) + feature % kLanes;
    const float* shrunk = e.shrunk_row(part, first_row + m);
    float acc = 0;
    for (int64_t r = 0; r < rank; ++r) acc += shrunk[r] * to_float(b[r * kLanes]);
    c[m * ldc] += acc;
  }
}

template <class T, int NG>
void add_part(const Expansion& e, int64_t part, const TileColumns& to, int rows,
              int64_t first_row) {
  const int64_t start = e.call.starts[part], end = start + e.call.sizes[part];
  const int64_t last = std::min(to.column + NG * kLanes, to.columns);
  const int64_t from = std::max(to.column, start), until = std::min(last, end);
  if (from >= until) return;
  // The last group of a part may be padded; then it must be the weight's last too.
  if (from == to.column && until == last && (from - start) % kLanes == 0) {
    return expand_groups<T, NG>(e, part, to, rows, first_row);
  }
  if constexpr (NG > 1) {
    for (int n = 0; n < NG; ++n) {
      const TileColumns one = {to.c + n * kLanes, to.ldc, to.column + n * kLanes, to.columns};
      add_part<T, 1>(e, part, one, rows, first_row);
    }
    return;
  }
  for (int64_t at = from; at < until; ++at) {
    expand_column<T>(e, part, at - start, to.c + at - to.column, to.ldc, rows, first_row);
  }
}

// Adds adapters to NG groups of columns of `rows` rows from `first_row` on.
template <class T, int NG>
void add_adapters(const Call& call, const TileColumns& to, int rows, int64_t first_row) {
  const Expansion e(call);
  for (int64_t part = 0; part < call.parts; ++part) {
    add_part<T, NG>(e, part, to, rows, first_row);
  }
}

}  // namespace RBLN_ISA
}  // namespace rbln
