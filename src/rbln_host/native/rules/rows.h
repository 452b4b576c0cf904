// SPDX-License-Identifier: Apache-2.0
// What works row by row: activations, norms, lookups, elementwise programs, copies.
#pragma once

#include "linear.h"

namespace rbln {

inline void check_gated_activation(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[1];
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(x.last() == 2 * out.last() && x.ndim == out.ndim && x.rows() == out.rows(),
         "the input must be twice as wide as the output");
}

inline void check_rms_norm(const Checker& c, Call& call) {
  const bool adds = call.op == Op::kAddRmsNorm;
  const Operand &x = call[0], &out = call[adds ? 3 : 2];
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(x, out) && x.last() > 0, "input and output have different shapes");
  const Operand& weight = call[adds ? 2 : 1];
  // Gemma's 1 + weight is kept in fp32.
  need_vector(c, weight, weight.dtype == DType::kFloat32 ? weight.dtype : x.dtype, x.last(),
              "weight");
  c.that(call.variance_size <= x.last(), "variance_size is larger than a row");
  if (!adds) return;
  need_rows(c, call[1], x.dtype, "residual");
  need_rows(c, call[4], x.dtype, "sum");
  need_own_memory(c, call[4], "sum");
  c.that(same_shape(call[1], x) && same_shape(call[4], x), "residual and input differ in shape");
}

inline void check_layer_norm(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[3];
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(x, out) && x.last() > 0, "input and output have different shapes");
  need_vector(c, call[1], x.dtype, x.last(), "weight");
  need_vector(c, call[2], x.dtype, x.last(), "bias");
}

inline void check_embedding(const Checker& c, Call& call) {
  const Operand &table = call[0], &ids = call[1], &out = call[2];
  need_axes(c, out, 2, "output");
  need_rows(c, out, table.dtype, "output");
  need_own_memory(c, out, "output");
  need_indices(c, ids, out.shape[0], "ids");
  c.that(call.rows > 0 && call.width == out.shape[1], "the output has another width");
  if (call.packed) return need_packed(c, table, table.dtype, call.rows, call.width);
  need_axes(c, table, 2, "table");
  need_rows(c, table, table.dtype, "table");
  c.that(table.shape[0] == call.rows && table.shape[1] == call.width, "the table has another size");
}

inline void check_elementwise(const Checker& c, Call& call) {
  const Operand& out = call[call.count - 1];
  need_own_memory(c, out, "output");
  for (int i = 0; i < call.count; ++i) {
    c.that(call[i].present && is_float(call[i].dtype), "operands must be floating point");
    c.that(same_shape(call[i], out), "operands must be expanded to the output's shape");
  }
  for (const ExpressionStep& step : call.expression) {
    c.that(step.step != Step::kInput || step.input < call.count - 1, "an input does not exist");
  }
}

inline void check_copy(const Checker& c, Call& call) {
  c.that(call[0].present && call[1].present && same_shape(call[0], call[1]),
         "source and target have different shapes");
  need_own_memory(c, call[1], "target");
}

}  // namespace rbln
