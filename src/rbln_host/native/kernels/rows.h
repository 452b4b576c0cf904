// SPDX-License-Identifier: Apache-2.0
// Operators that work row by row: norms, gated activation, embedding, argmax.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace rbln {
namespace RBLN_ISA {

// Rows per task for operators that do little work per element.
inline int64_t rows_per_task(int64_t rows, int64_t width) {
  const int64_t few = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, width));
  return std::min(few, std::max<int64_t>(1, rows));
}

// Rows of the output that must be computed.
inline int64_t rows_in_use(const Call& call, const Shared& shared) {
  const Operand& out = call[call.count - 1];
  if (out.ndim < 2 || out.shape[0] == 0) return out.rows();
  return out.rows() / out.shape[0] * in_use(call, shared, out.shape[0]);
}

inline int64_t plan_rows(const Call& call, Shared& shared, int) {
  const Operand& out = call[call.count - 1];
  const int64_t rows = rows_in_use(call, shared);
  const int64_t per_task = rows_per_task(rows, out.last());
  return (rows + per_task - 1) / per_task;
}

inline size_t no_scratch(const Call&) { return 0; }

// Asks for rows [first, end) of an operand at once. They were last written by several cores, and
// one line after another from another core's cache takes ten times as long as many together.
template <class T>
RBLN_INLINE void fetch_rows(const Operand& x, int64_t first, int64_t end) {
  const int64_t bytes = x.last() * static_cast<int64_t>(sizeof(T));
  for (int64_t row = first; row < end; ++row) {
    const char* start = reinterpret_cast<const char*>(x.as<T>() + x.row_offset(row));
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(start + i);
  }
}

struct RowRange {
  int64_t first, end;
};

// The rows of a task planned by plan_rows.
inline RowRange rows_of_task(const Call& call, const Shared& shared, int64_t task) {
  const int64_t rows = rows_in_use(call, shared);
  const int64_t per_task = rows_per_task(rows, call[call.count - 1].last());
  return {task * per_task, std::min(rows, (task + 1) * per_task)};
}

// Calls `function(row)` for each of them.
template <class F>
RBLN_INLINE void for_rows(const Call& call, const Shared& shared, int64_t task, F function) {
  const RowRange rows = rows_of_task(call, shared, task);
  for (int64_t row = rows.first; row < rows.end; ++row) function(row);
}

inline size_t row_scratch(const Call& call) {
  return static_cast<size_t>(call[0].last() + kLanes) * sizeof(float);
}

// Mean of the squares of the first `count` elements.
RBLN_INLINE float mean_square(const float* x, int64_t count) {
  Vec total{};
  for_vectors(count, [&](int64_t i, auto lanes) {
    const Vec v = load_some(x + i, lanes);
    total += v * v;
  });
  return sum(total) / static_cast<float>(count);
}

// rms_norm: x, weight, out. add_rms_norm: x, residual, weight, out, sum.
template <class T, bool kAdds>
void rms_norm_rows(const Call& call, const Shared& shared, int64_t task, float* row_f32) {
  const Operand &x = call[0], &weight = call[kAdds ? 2 : 1], &out = call[kAdds ? 3 : 2];
  const int64_t width = x.last();
  const int64_t measured = call.variance_size ? call.variance_size : width;
  const RowRange rows = rows_of_task(call, shared, task);
  fetch_rows<T>(x, rows.first, rows.end);
  if constexpr (kAdds) fetch_rows<T>(call[1], rows.first, rows.end);
  for_rows(call, shared, task, [&](int64_t row) {
    const T* source = x.as<T>() + x.row_offset(row);
    const T* residual = kAdds ? call[1].as<T>() + call[1].row_offset(row) : nullptr;
    T* total = kAdds ? call[4].as<T>() + call[4].row_offset(row) : nullptr;
    for_vectors(width, [&](int64_t i, auto lanes) {
      Vec v = load_some(source + i, lanes);
      if constexpr (kAdds) {
        v += load_some(residual + i, lanes);
        store_some(total + i, v, lanes);
      }
      store_some(row_f32 + i, v, lanes);
    });
    const float factor = 1.0f / std::sqrt(mean_square(row_f32, measured) + call.epsilon);
    T* target = out.as<T>() + out.row_offset(row);
    const bool in_f32 = weight.dtype == DType::kFloat32;
    for_vectors(width, [&](int64_t i, auto lanes) {
      Vec v = load_some(row_f32 + i, lanes) * factor;
      if (weight.present) {
        v *= in_f32 ? load_some(weight.as<float>() + i, lanes)
                    : load_some(weight.as<T>() + i, lanes);
      }
      store_some(target + i, v, lanes);
    });
  });
}

inline void rms_norm_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  with_float_type(call[0].dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    float* row = reinterpret_cast<float*>(scratch);
    if (call.op == Op::kAddRmsNorm) return rms_norm_rows<T, true>(call, shared, task, row);
    rms_norm_rows<T, false>(call, shared, task, row);
  });
}

template <class T>
void layer_norm_rows(const Call& call, const Shared& shared, int64_t task, float* row_f32) {
  const Operand &x = call[0], &weight = call[1], &bias = call[2], &out = call[3];
  const int64_t width = x.last();
  for_rows(call, shared, task, [&](int64_t row) {
    const T* source = x.as<T>() + x.row_offset(row);
    T* target = out.as<T>() + out.row_offset(row);
    Vec total{};
    for_vectors(width, [&](int64_t i, auto lanes) {
      const Vec v = load_some(source + i, lanes);
      store_some(row_f32 + i, v, lanes);
      total += v;
    });
    const float mean = sum(total) / static_cast<float>(width);
    for_vectors(width, [&](int64_t i, auto lanes) {
      store_some(row_f32 + i, load_some(row_f32 + i, lanes) - mean, lanes);
    });
    const float factor = 1.0f / std::sqrt(mean_square(row_f32, width) + call.epsilon);
    for_vectors(width, [&](int64_t i, auto lanes) {
      Vec v = load_some(row_f32 + i, lanes) * factor;
      if (weight.present) v *= load_some(weight.as<T>() + i, lanes);
      if (bias.present) v += load_some(bias.as<T>() + i, lanes);
      store_some(target + i, v, lanes);
    });
  });
}

inline void layer_norm_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  with_float_type(call[0].dtype, [&](auto* type) {
    layer_norm_rows<std::remove_pointer_t<decltype(type)>>(call, shared, task,
                                                           reinterpret_cast<float*>(scratch));
  });
}

template <class T>
void gated_activation_rows(const Call& call, const Shared& shared, int64_t task) {
  const Operand &x = call[0], &out = call[1];
  const int64_t width = out.last();
  for_rows(call, shared, task, [&](int64_t row) {
    const T* gate = x.as<T>() + x.row_offset(row);
    T* target = out.as<T>() + out.row_offset(row);
    for_vectors(width, [&](int64_t i, auto lanes) {
      const Vec g = activate(call.activation, load_some(gate + i, lanes));
      store_some(target + i, g * load_some(gate + width + i, lanes), lanes);
    });
  });
}

inline void gated_activation_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  with_float_type(call[0].dtype, [&](auto* type) {
    gated_activation_rows<std::remove_pointer_t<decltype(type)>>(call, shared, task);
  });
}

// Copies row `id` of a table packed for `linear` (see tile.h).
template <class T>
RBLN_INLINE void unpack_row(const T* table, int64_t id, int64_t width, T* out) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const T* group = table + id / 16 * ((width + 1) / 2 * 32) + id % 16 * 2;
    for (int64_t i = 0; i < width; ++i) out[i] = group[i / 2 * 32 + i % 2];
  } else {
    const T* group = table + id / 16 * (width * 16) + id % 16;
    for (int64_t i = 0; i < width; ++i) out[i] = group[i * 16];
  }
}

template <class T>
void embedding_rows(const Call& call, Shared& shared, int64_t task) {
  const Operand &table = call[0], &ids = call[1], &out = call[2];
  for_rows(call, shared, task, [&](int64_t row) {
    const int64_t id = load_index(ids, row);
    T* target = out.as<T>() + out.row_offset(row);
    if (id < 0 || id >= call.rows) return shared.fail(Fault::kId, id);
    if (call.packed) return unpack_row(table.as<T>(), id, call.width, target);
    std::memcpy(target, table.as<T>() + id * table.stride[0], call.width * sizeof(T));
  });
}

inline void embedding_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  with_float_type(call[0].dtype, [&](auto* type) {
    embedding_rows<std::remove_pointer_t<decltype(type)>>(call, shared, task);
  });
}

// One task per row.
inline int64_t argmax_plan(const Call& call, Shared& shared, int) {
  return in_use(call, shared, call[0].shape[0]);
}

// The first of the largest elements; a NaN counts as larger than everything, as in torch.
template <class T>
int64_t first_largest(const T* values, int64_t width) {
  Vec most = splat(-INFINITY);
  IVec nan{};
  for (int64_t i = 0; i + kLanes <= width; i += kLanes) {
    const Vec v = load(values + i);
    nan |= v != v;
    most = vmax(v, most);
  }
  float best = max_of(most);
  bool has_nan = any_of(nan);
  for (int64_t i = width / kLanes * kLanes; i < width; ++i) {
    const float v = to_float(values[i]);
    has_nan |= v != v;
    best = v > best ? v : best;
  }
  const auto is_best = [&](auto v) { return has_nan ? v != v : v == best; };
  int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) {
    if (any_of(is_best(load(values + at)))) break;
  }
  while (at < width - 1 && !is_best(to_float(values[at]))) ++at;
  return at;
}

template <class T>
void argmax_row(const Call& call, int64_t row) {
  const Operand &x = call[0], &out = call[1];
  out.as<int64_t>()[row * out.stride[0]] = first_largest(x.as<T>() + x.row_offset(row), x.last());
}

inline void argmax_run(const Call& call, Shared&, int64_t task, std::byte*) {
  with_float_type(call[0].dtype, [&](auto* type) {
    argmax_row<std::remove_pointer_t<decltype(type)>>(call, task);
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
