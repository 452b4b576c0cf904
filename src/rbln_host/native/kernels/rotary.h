// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding (Su et al., RoFormer) and the write of keys and values to the pool.
#pragma once

#include <algorithm>

#include "rows.h"

namespace rbln {
namespace RBLN_ISA {

// Rotates one head: pairs (i, i + R/2) when `neox`, else (2i, 2i + 1). The rest passes through.
template <class T>
RBLN_INLINE void rotate_head(const T* x, const T* cos_sin, int64_t rotary, int64_t size, bool neox,
                             T* out) {
  const int64_t half = rotary / 2;
  const T* sin = cos_sin + half;
  if (neox) {
    for_vectors(half, [&](int64_t i, auto lanes) {
      const Vec a = load_some(x + i, lanes), b = load_some(x + half + i, lanes);
      const Vec c = load_some(cos_sin + i, lanes), s = load_some(sin + i, lanes);
      store_some(out + i, a * c - b * s, lanes);
      store_some(out + half + i, b * c + a * s, lanes);
    });
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
      const float c = to_float(cos_sin[i]), s = to_float(sin[i]);
      out[2 * i] = from_float<T>(a * c - b * s);
      out[2 * i + 1] = from_float<T>(b * c + a * s);
    }
  }
  if (rotary < size) std::memcpy(out + rotary, x + rotary, (size - rotary) * sizeof(T));
}

// The row of the cos/sin table for token `n`, or null (and a fault) when its position is outside.
template <class T>
RBLN_INLINE const T* cos_sin_row(const Operand& positions, const Operand& table, int64_t n,
                                 Shared& shared) {
  const int64_t position = load_index(positions, n);
  if (position < 0 || position >= table.shape[0]) {
    shared.fail(Fault::kPosition, position);
    return nullptr;
  }
  return table.as<T>() + position * table.stride[0];
}

inline int64_t tokens_per_task(const Call& call) {
  const Operand& x = call[0];
  return rows_per_task(x.shape[0], x.shape[1] * x.shape[2] * 2);
}

inline int64_t plan_tokens(const Call& call, Shared& shared, int) {
  const int64_t per_task = tokens_per_task(call);
  return (in_use(call, shared, call[0].shape[0]) + per_task - 1) / per_task;
}

template <class F>
RBLN_INLINE void for_tokens(const Call& call, const Shared& shared, int64_t task, F function) {
  const int64_t per_task = tokens_per_task(call);
  const int64_t end = std::min(in_use(call, shared, call[0].shape[0]), (task + 1) * per_task);
  for (int64_t n = task * per_task; n < end; ++n) function(n);
}

template <class T>
RBLN_INLINE void rotate_heads(const Operand& x, int64_t n, const T* row, int64_t rotary, bool neox,
                              const Operand& out) {
  for (int64_t head = 0; head < x.shape[1]; ++head) {
    rotate_head(x.as<T>() + n * x.stride[0] + head * x.stride[1], row, rotary, x.shape[2], neox,
                out.as<T>() + n * out.stride[0] + head * out.stride[1]);
  }
}

template <class T>
void rotary_tokens(const Call& call, Shared& shared, int64_t task) {
  for_tokens(call, shared, task, [&](int64_t n) {
    const T* row = cos_sin_row<T>(call[1], call[2], n, shared);
    if (row) rotate_heads(call[0], n, row, call[2].shape[1], call.neox, call[3]);
  });
}

inline void rotary_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  with_float_type(call[0].dtype, [&](auto* type) {
    rotary_tokens<std::remove_pointer_t<decltype(type)>>(call, shared, task);
  });
}

// Where in the pool token `n` of head 0 goes, or null for padding or a slot outside (a fault).
template <class T>
RBLN_INLINE T* pool_place(const Operand& kv, const Operand& slots, int64_t n, Shared& shared) {
  const int64_t slot = load_index(slots, n);
  if (slot < 0) return nullptr;
  const int64_t block = slot / kv.shape[2];
  if (block >= kv.shape[0]) {
    shared.fail(Fault::kSlot, slot);
    return nullptr;
  }
  return kv.as<T>() + block * kv.stride[0] + slot % kv.shape[2] * kv.stride[2];
}

template <class T>
void write_kv_tokens(const Call& call, Shared& shared, int64_t task) {
  const Operand &key = call[0], &value = call[1], &kv = call[2];
  const int64_t size = key.shape[2];
  for_tokens(call, shared, task, [&](int64_t n) {
    T* place = pool_place<T>(kv, call[3], n, shared);
    if (!place) return;
    for (int64_t head = 0; head < key.shape[1]; ++head, place += kv.stride[1]) {
      const T* k = key.as<T>() + n * key.stride[0] + head * key.stride[1];
      const T* v = value.as<T>() + n * value.stride[0] + head * value.stride[1];
      std::memcpy(place, k, size * sizeof(T));
      std::memcpy(place + size, v, size * sizeof(T));
    }
  });
}

inline void write_kv_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  with_float_type(call[0].dtype, [&](auto* type) {
    write_kv_tokens<std::remove_pointer_t<decltype(type)>>(call, shared, task);
  });
}

// q, k, v, positions, cos_sin, kv, slots, rotated q.
template <class T>
void rotary_write_kv_tokens(const Call& call, Shared& shared, int64_t task) {
  const Operand &query = call[0], &key = call[1], &value = call[2], &kv = call[5];
  const int64_t size = key.shape[2], rotary = call[4].shape[1];
  for_tokens(call, shared, task, [&](int64_t n) {
    const T* row = cos_sin_row<T>(call[3], call[4], n, shared);
    if (!row) return;
    rotate_heads(query, n, row, rotary, call.neox, call[7]);
    T* place = pool_place<T>(kv, call[6], n, shared);
    if (!place) return;
    for (int64_t head = 0; head < key.shape[1]; ++head, place += kv.stride[1]) {
      rotate_head(key.as<T>() + n * key.stride[0] + head * key.stride[1], row, rotary, size,
                  call.neox, place);
      std::memcpy(place + size, value.as<T>() + n * value.stride[0] + head * value.stride[1],
                  size * sizeof(T));
    }
  });
}

inline void rotary_write_kv_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  with_float_type(call[0].dtype, [&](auto* type) {
    rotary_write_kv_tokens<std::remove_pointer_t<decltype(type)>>(call, shared, task);
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
