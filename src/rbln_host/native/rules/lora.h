// SPDX-License-Identifier: Apache-2.0
// Adapters: lora_shrink, and linears with adapters.
#pragma once

#include "linear.h"

namespace rbln {

// Slots and ranks of the rows, and that each part's module has a rank.
inline void need_adapters(const Checker& c, const Call& call, int first, int64_t rows) {
  const Operand &slots = call[first], &ranks = call[first + 1];
  need_indices(c, slots, rows, "slots");
  need_axes(c, ranks, 2, "ranks");
  c.that(!is_float(ranks.dtype), "ranks must hold integers");
  for (int64_t part = 0; part < call.parts; ++part) {
    c.that(call.modules[part] < ranks.shape[0], "a part's module has no ranks");
  }
}

inline void need_shrunk(const Checker& c, const Operand& t, int64_t rows, int64_t columns) {
  need_axes(c, t, 2, "shrunk");
  need_rows(c, t, DType::kFloat32, "shrunk");
  c.that(t.shape[0] == rows && t.shape[1] == columns, "shrunk has the wrong size");
}

inline void check_lora_shrink(const Checker& c, Call& call) {
  c.that(call.count == call.parts + 4, "it takes an A for each part");
  const Operand &x = call[0], &a = call[3], &out = call[call.count - 1];
  need_axes(c, x, 2, "input");
  need_rows(c, x, x.dtype, "input");
  need_adapters(c, call, 1, x.shape[0]);
  for (int64_t part = 0; part < call.parts; ++part) {
    const Operand& each = call[3 + static_cast<int>(part)];
    need_axes(c, each, 3, "A");
    c.that(each.dtype == x.dtype && is_contiguous(each) && same_shape(each, a),
           "each A must be contiguous, of the input's dtype and of one shape");
  }
  c.that(a.shape[0] == call[2].shape[1] && a.shape[1] > 0 && a.shape[2] == x.shape[1],
         "A needs a matrix of the input's width for each slot");
  need_shrunk(c, out, x.shape[0], call.parts * a.shape[1]);
  need_own_memory(c, out, "output");
}

// What a linear of `columns` columns takes of adapters, before its output.
inline void need_expansion(const Checker& c, const Call& call, int own, int64_t columns) {
  c.that(call.count == own + 3 + call.parts + 1, "it takes a B for each part");
  const int64_t rows = call[0].shape[0];
  need_adapters(c, call, own + 1, rows);
  const int64_t slots = call[own + 2].shape[1];
  need_axes(c, call[own + 3], 4, "B");
  const int64_t rank = call[own + 3].shape[2];
  c.that(rank > 0, "B has no ranks");
  need_shrunk(c, call[own], rows, call.parts * rank);
  for (int64_t part = 0; part < call.parts; ++part) {
    const Operand& b = call[own + 3 + static_cast<int>(part)];
    const int64_t start = call.starts[part], size = call.sizes[part];
    c.that(size > 0 && size <= columns && start <= columns - size, "a part is outside the columns");
    need_axes(c, b, 4, "B");
    c.that(b.dtype == call[0].dtype && is_contiguous(b) && b.shape[0] == slots &&
               b.shape[1] == (size + 15) / 16 && b.shape[2] == rank && b.shape[3] == 16,
           "B needs groups of 16 columns for each slot");
  }
}

inline void check_lora_linear(const Checker& c, Call& call) {
  check_linear(c, call);
  need_expansion(c, call, 4, call[call.count - 1].shape[1]);
}

inline void check_lora_gated_linear(const Checker& c, Call& call) {
  check_gated_linear(c, call);
  need_expansion(c, call, 3, 2 * call[call.count - 1].shape[1]);
}

}  // namespace rbln
