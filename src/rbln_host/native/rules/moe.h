// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts.
#pragma once

#include <cstdint>

#include "linear.h"

namespace rbln {

// The weights of each expert follow each other, packed as one.
inline void need_packed_experts(const Checker& c, const Operand& w, DType dtype, int64_t columns,
                                int64_t k) {
  need_axes(c, w, dtype == DType::kBFloat16 ? 5 : 4, "weight");
  c.that(w.shape[0] > 0 && w.shape[0] < INT32_MAX, "there is no possible number of experts");
  c.that(is_contiguous(w), "the weight is not packed");
  Operand one = w;
  one.ndim = w.ndim - 1;
  for (int axis = 0; axis < one.ndim; ++axis) {
    one.shape[axis] = w.shape[axis + 1];
    one.stride[axis] = w.stride[axis + 1];
  }
  need_packed(c, one, dtype, columns, k);
}

inline void need_expert_bias(const Checker& c, const Operand& bias, DType dtype, int64_t experts,
                             int64_t columns) {
  if (!bias.present) return;
  need_axes(c, bias, 2, "bias");
  need_rows(c, bias, dtype, "bias");
  c.that(bias.shape[0] == experts && bias.shape[1] == columns, "bias has the wrong size");
}

// A number of an expert for each token and choice.
inline void need_experts(const Checker& c, const Operand& experts, int64_t tokens,
                         int64_t choices) {
  need_axes(c, experts, 2, "experts");
  c.that(!is_float(experts.dtype), "experts must hold integers");
  c.that(experts.shape[0] == tokens && experts.shape[1] == choices, "experts has the wrong size");
  c.that(choices > 0 && tokens < INT32_MAX / choices, "there are too many rows");
}

inline void check_route(const Checker& c, Call& call) {
  const Operand &logits = call[0], &weights = call[1], &experts = call[2];
  need_axes(c, logits, 2, "logits");
  need_rows(c, logits, logits.dtype, "logits");
  need_axes(c, weights, 2, "weights");
  need_rows(c, weights, logits.dtype, "weights");
  need_own_memory(c, weights, "weights");
  c.that(weights.shape[0] == logits.shape[0], "logits and weights have different rows");
  c.that(weights.shape[1] <= logits.shape[1], "more experts are chosen than there are");
  need_experts(c, experts, weights.shape[0], weights.shape[1]);
  c.that(experts.dtype == DType::kInt64, "experts must be int64");
  need_own_memory(c, experts, "experts");
}

inline void check_gated_experts(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[4];
  need_axes(c, x, 2, "input");
  need_rows(c, x, x.dtype, "input");
  need_axes(c, out, 3, "output");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(out.shape[2] > 0 && out.shape[2] % 16 == 0, "columns must be a multiple of 16");
  c.that(x.shape[1] > 0, "experts without columns");
  need_packed_experts(c, call[1], x.dtype, 2 * out.shape[2], x.shape[1]);
  need_expert_bias(c, call[2], x.dtype, call[1].shape[0], 2 * out.shape[2]);
  need_experts(c, call[3], out.shape[0], out.shape[1]);
}

inline void check_combine_experts(const Checker& c, Call& call) {
  const Operand &x = call[0], &weights = call[4], &out = call[5];
  need_axes(c, x, 3, "input");
  need_rows(c, x, x.dtype, "input");
  need_axes(c, out, 2, "output");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(x.shape[2] > 0 && out.shape[1] > 0, "experts without columns");
  need_packed_experts(c, call[1], x.dtype, out.shape[1], x.shape[2]);
  need_expert_bias(c, call[2], x.dtype, call[1].shape[0], out.shape[1]);
  need_experts(c, call[3], x.shape[0], x.shape[1]);
  need_axes(c, weights, 2, "weights");
  need_rows(c, weights, x.dtype, "weights");
  c.that(weights.shape[0] == x.shape[0] && weights.shape[1] == x.shape[1],
         "weights has the wrong size");
}

}  // namespace rbln
