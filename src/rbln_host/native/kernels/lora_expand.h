// SPDX-License-Identifier: Apache-2.0
// What linears add for adapters: B times what lora_shrink has made of x.
//
// The operands come before the output: shrunk, slots, ranks, B of each part. Every number is one
// chain of multiply-adds, whatever rows are computed with it.
#pragma once

#include <algorithm>

#include "adapter_rows.h"
#include "tile.h"

namespace rbln {
namespace RBLN_ISA {

constexpr int kExpandRows = 4;

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
