// SPDX-License-Identifier: Apache-2.0
// Linears, and the packed weights they read.
#pragma once

#include "operands.h"

namespace rbln {

inline void need_packed(const Checker& c, const Operand& w, DType dtype, int64_t columns,
                        int64_t k) {
  c.that(w.present && w.dtype == dtype && is_contiguous(w), "the weight is not packed");
  const int64_t groups = (columns + 15) / 16;
  const bool pairs = dtype == DType::kBFloat16;
  const bool fits =
      pairs ? w.ndim == 4 && w.shape[1] == (k + 1) / 2 && w.shape[2] == 16 && w.shape[3] == 2
            : w.ndim == 3 && w.shape[1] == k && w.shape[2] == 16;
  c.that(fits && w.shape[0] == groups, "the packed weight does not have the input's width");
}

inline void check_linear(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[call.count - 1];
  need_axes(c, x, 2, "input");
  need_axes(c, out, 2, "output");
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(x.shape[1] > 0 && out.shape[1] > 0, "a linear without columns");
  need_packed(c, call[1], x.dtype, out.shape[1], x.shape[1]);
  need_vector(c, call[2], x.dtype, out.shape[1], "bias");
  if (!call[3].present) return;
  need_rows(c, call[3], x.dtype, "residual");
  c.that(same_shape(call[3], out), "residual and output have different shapes");
}

inline void check_gated_linear(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[call.count - 1];
  need_axes(c, x, 2, "input");
  need_axes(c, out, 2, "output");
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(out.shape[1] > 0 && out.shape[1] % 16 == 0, "columns must be a multiple of 16");
  c.that(x.shape[1] > 0, "a linear without columns");
  need_packed(c, call[1], x.dtype, 2 * out.shape[1], x.shape[1]);
  need_vector(c, call[2], x.dtype, 2 * out.shape[1], "bias");
}

}  // namespace rbln
