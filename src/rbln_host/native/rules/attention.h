// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, the KV pool, and attention.
#pragma once

#include <cstdint>

#include "operands.h"

namespace rbln {

inline void need_heads(const Checker& c, const Operand& t, DType dtype, const char* name) {
  need_axes(c, t, 3, name);
  need_rows(c, t, dtype, name);
}

inline void need_cos_sin(const Checker& c, const Operand& table, DType dtype, int64_t head_size) {
  need_axes(c, table, 2, "cos/sin table");
  need_rows(c, table, dtype, "cos/sin table");
  c.that(table.shape[1] <= head_size && table.shape[1] % 2 == 0,
         "the rotary size is odd or larger than the head");
}

inline void need_pool(const Checker& c, const Operand& kv, DType dtype, int64_t heads,
                      int64_t head_size) {
  need_axes(c, kv, 4, "KV pool");
  need_rows(c, kv, dtype, "KV pool");
  need_own_memory(c, kv, "KV pool");
  c.that(kv.shape[1] == heads && kv.shape[3] == 2 * head_size,
         "the KV pool has other heads than the keys");
  c.that(kv.shape[0] > 0 && kv.shape[2] > 0, "the KV pool is empty");
}

inline void check_rotary(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[3];
  need_heads(c, x, x.dtype, "input");
  need_heads(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(x, out), "input and output have different shapes");
  need_indices(c, call[1], x.shape[0], "positions");
  need_cos_sin(c, call[2], x.dtype, x.shape[2]);
}

inline void check_keys_and_values(const Checker& c, const Operand& key, const Operand& value,
                                  const Operand& kv) {
  need_heads(c, key, key.dtype, "key");
  need_heads(c, value, key.dtype, "value");
  c.that(same_shape(key, value), "keys and values have different shapes");
  need_pool(c, kv, key.dtype, key.shape[1], key.shape[2]);
}

inline void check_rotary_write_kv(const Checker& c, Call& call) {
  const Operand &query = call[0], &key = call[1], &out = call[7];
  check_keys_and_values(c, key, call[2], call[5]);
  need_heads(c, query, key.dtype, "query");
  need_heads(c, out, key.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(query, out), "query and output have different shapes");
  c.that(query.shape[0] == key.shape[0] && query.shape[2] == key.shape[2],
         "queries and keys differ in tokens or head size");
  need_indices(c, call[3], key.shape[0], "positions");
  need_cos_sin(c, call[4], key.dtype, key.shape[2]);
  need_indices(c, call[6], key.shape[0], "slots");
}

inline void check_write_kv(const Checker& c, Call& call) {
  check_keys_and_values(c, call[0], call[1], call[2]);
  need_indices(c, call[3], call[0].shape[0], "slots");
}

inline void check_attention(const Checker& c, Call& call) {
  const Operand &query = call[0], &kv = call[1], &table = call[2], &sinks = call[4],
                &alibi = call[5], &out = call[6];
  need_heads(c, query, query.dtype, "query");
  need_heads(c, out, query.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(query, out), "query and output have different shapes");
  need_axes(c, kv, 4, "KV pool");
  c.that(kv.shape[1] > 0 && query.shape[1] % kv.shape[1] == 0 && query.shape[1] > 0,
         "query heads must be a multiple of KV heads");
  need_pool(c, kv, query.dtype, kv.shape[1], query.shape[2]);
  c.that(query.shape[2] > 0 && query.shape[2] % 16 == 0, "the head size must be a multiple of 16");
  need_axes(c, table, 2, "block table");
  c.that(table.dtype == DType::kInt32, "the block table must be int32");
  c.that(table.shape[0] > 0 && query.shape[0] % table.shape[0] == 0,
         "tokens must be a multiple of sequences");
  c.that(table.shape[1] <= 1 || table.stride[1] > 0, "the block table is broadcast");
  c.that(table.shape[1] <= INT32_MAX / kv.shape[2], "the context is longer than 2^31 positions");
  need_indices(c, call[3], query.shape[0], "positions");
  if (sinks.present) {
    c.that(sinks.ndim == 1 && sinks.shape[0] == query.shape[1] && sinks.stride[0] == 1 &&
               (sinks.dtype == DType::kFloat32 || sinks.dtype == query.dtype),
           "sinks need one number per head");
  }
  need_vector(c, alibi, DType::kFloat32, query.shape[1], "alibi slopes");
}

inline void check_encoder_attention(const Checker& c, Call& call) {
  const Operand &query = call[0], &key = call[1], &value = call[2], &out = call[4];
  need_heads(c, query, query.dtype, "query");
  need_heads(c, key, query.dtype, "key");
  need_heads(c, value, query.dtype, "value");
  need_heads(c, out, query.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(query, out), "query and output have different shapes");
  c.that(same_shape(key, value), "keys and values have different shapes");
  c.that(key.shape[0] == query.shape[0] && key.shape[2] == query.shape[2],
         "queries and keys differ in tokens or head size");
  c.that(key.shape[1] > 0 && query.shape[1] % key.shape[1] == 0 && query.shape[1] > 0,
         "query heads must be a multiple of KV heads");
  c.that(query.shape[2] > 0 && query.shape[2] % 16 == 0, "the head size must be a multiple of 16");
  c.that(query.shape[0] <= INT32_MAX, "there are more than 2^31 tokens");
  need_axes(c, call[3], 1, "row starts");
  c.that(!is_float(call[3].dtype), "row starts must hold integers");
  c.that(call[3].shape[0] > 0, "row starts need the end of the last row");
}

}  // namespace rbln
