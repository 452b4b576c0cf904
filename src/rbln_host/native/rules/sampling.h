// SPDX-License-Identifier: Apache-2.0
// The best token, bitmasks of grammars, and tokens that are drawn.
#pragma once

#include <cstdint>

#include "operands.h"

namespace rbln {

inline void check_argmax(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[1];
  need_rows(c, x, x.dtype, "input");
  c.that(x.ndim == 2 && x.shape[1] > 0, "input needs rows of at least one element");
  need_axes(c, out, 1, "output");
  c.that(out.dtype == DType::kInt64 && out.shape[0] == x.shape[0],
         "output must be int64, one a row");
  need_own_memory(c, out, "output");
}

inline void need_logits(const Checker& c, const Operand& logits) {
  need_axes(c, logits, 2, "logits");
  need_rows(c, logits, logits.dtype, "logits");
  c.that(logits.shape[1] > 0 && logits.shape[1] < INT32_MAX, "the vocabulary has no possible size");
}

inline void need_bitmask(const Checker& c, const Operand& mask, const Operand& logits) {
  need_axes(c, mask, 2, "bitmask");
  c.that(mask.dtype == DType::kInt32 && (mask.shape[1] <= 1 || mask.stride[1] == 1),
         "the bitmask must be int32, words of a row next to each other");
  c.that(mask.shape[0] == logits.shape[0] && mask.shape[1] == (logits.shape[1] + 31) / 32,
         "the bitmask needs a row for each row of logits and a bit for each token");
}

inline void check_mask_tokens(const Checker& c, Call& call) {
  need_logits(c, call[1]);
  need_own_memory(c, call[1], "logits");
  need_bitmask(c, call[0], call[1]);
}

inline void need_one_a_row(const Checker& c, const Operand& t, DType dtype, int64_t rows,
                           const char* name) {
  need_axes(c, t, 1, name);
  c.that(t.dtype == dtype && t.shape[0] == rows,
         std::string(name) + " has the wrong dtype or size");
}

inline void check_sample(const Checker& c, Call& call) {
  need_logits(c, call[0]);
  const int64_t rows = call[0].shape[0];
  need_one_a_row(c, call[1], DType::kFloat32, rows, "temperature");
  need_one_a_row(c, call[2], DType::kInt32, rows, "top_k");
  need_one_a_row(c, call[3], DType::kFloat32, rows, "top_p");
  need_one_a_row(c, call[4], DType::kInt64, rows, "seed");
  need_one_a_row(c, call[5], DType::kInt64, rows, "position");
  if (call[6].present) need_bitmask(c, call[6], call[0]);
  need_one_a_row(c, call[7], DType::kInt64, rows, "token");
  need_one_a_row(c, call[8], DType::kFloat32, rows, "threshold");
  need_own_memory(c, call[7], "token");
  need_own_memory(c, call[8], "threshold");
}

}  // namespace rbln
