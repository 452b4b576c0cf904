// SPDX-License-Identifier: Apache-2.0
// linear and gated_linear: rows times packed weights, with what follows fused in.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lora_expand.h"
#include "tile.h"

namespace rbln {
namespace RBLN_ISA {

// Columns are cut into units; a unit is one task. A unit of a gated linear is that many gate groups
// and the up groups that belong to them.
struct LinearShape {
  int64_t rows, k, groups;
  bool gated, adapted;

  static LinearShape of(const Call& call, const Shared& shared) {
    LinearShape s;
    const Operand& x = call[0];
    s.gated = call.op == Op::kGatedLinear || call.op == Op::kLoraGatedLinear;
    s.adapted = has_adapters(call);
    s.rows = in_use(call, shared, x.shape[0]);
    s.k = x.shape[1];
    const int64_t all = call[1].shape[0];
    s.groups = s.gated ? all / 2 : all;
    return s;
  }
};

constexpr int64_t kTaskBytes = 256 * 1024;  // weights a task reads: some microseconds of bandwidth

// How groups are cut into tasks: `large` tasks of `per_task` groups, then granules, the fewest
// groups that a task computes at full speed. With many rows the last quarter is cut into granules,
// so that threads end together (a prefill of 256 rows: 3 %); with few, whose weights are read once,
// that cost as much. The cut depends on the shape alone: results never do, but a plan that is the
// same for every number of threads is easier to reason about.
constexpr int64_t kManyRows = 64;

struct LinearTasks {
  int64_t granule, per_task, large, count;

  static LinearTasks of(const LinearShape& s, int64_t group_bytes) {
    LinearTasks t;
    t.granule = s.rows > kSlimRows ? (s.gated ? 1 : 2) : (s.gated ? 2 : 4);
    int64_t units =
        std::max<int64_t>(1, kTaskBytes / (group_bytes * (s.gated ? 2 : 1) * t.granule));
    // Few columns: smaller tasks, so that all threads get some. With more rows a task is longer,
    // and so is what one thread waits for another at the end.
    const int64_t least = s.rows > kWideRows ? 12 : 8;
    while (units > 1 && s.groups / (t.granule * units) < least) units /= 2;
    t.per_task = t.granule * units;
    const int64_t whole = (s.groups + t.per_task - 1) / t.per_task;
    t.large = s.rows >= kManyRows ? s.groups * 3 / 4 / t.per_task : whole;
    const int64_t rest = std::max<int64_t>(0, s.groups - t.large * t.per_task);
    t.count = t.large + (rest + t.granule - 1) / t.granule;
    return t;
  }

  int64_t start(int64_t task) const {
    return std::min(task, large) * per_task + std::max<int64_t>(0, task - large) * granule;
  }
};

inline int64_t group_bytes(const Call& call) {
  const int64_t k = call[0].shape[1];
  return call[0].dtype == DType::kBFloat16 ? (k + 1) / 2 * 64 : k * kLanes * size_of(call[0].dtype);
}

inline int64_t linear_plan(const Call& call, Shared& shared, int) {
  const LinearShape s = LinearShape::of(call, shared);
  if (s.rows == 0) return 0;
  return LinearTasks::of(s, group_bytes(call)).count;
}

inline size_t linear_scratch(const Call& call) {
  const size_t tile_floats = kWideRows * 64;
  const size_t row_floats = kHasDot && call[0].dtype == DType::kBFloat16
                                ? 0
                                : static_cast<size_t>(kWideRows * call[0].shape[1]);
  return (tile_floats + row_floats) * sizeof(float);
}

// Writes `rows` finished rows of 16 columns starting at column `column`.
template <class T>
RBLN_INLINE void finish_column(const Call& call, const float* c, int64_t ldc, int rows,
                               int64_t first_row, int64_t column) {
  const Operand &bias = call[2], &residual = call[3], &out = call[call.count - 1];
  const int64_t count = std::min<int64_t>(kLanes, out.shape[1] - column);
  Vec bias_vec{};
  if (bias.present) bias_vec = load_some(bias.as<T>() + column, count);
  for (int m = 0; m < rows; ++m) {
    Vec v = activate(call.activation, load(c + m * ldc) + bias_vec);
    const int64_t row = first_row + m;
    if (residual.present) {
      v += load_some(residual.as<T>() + row * residual.stride[0] + column, count);
    }
    store_some(out.as<T>() + row * out.stride[0] + column, v, count);
  }
}

template <class T>
RBLN_INLINE void finish_gated(const Call& call, const float* gate, const float* up, int64_t ldc,
                              int rows, int64_t first_row, int64_t column) {
  const Operand &bias = call[2], &out = call[call.count - 1];
  Vec gate_bias{}, up_bias{};
  if (bias.present) {
    gate_bias = load(bias.as<T>() + column);
    up_bias = load(bias.as<T>() + out.shape[1] + column);
  }
  for (int m = 0; m < rows; ++m) {
    const Vec g = activate(call.activation, load(gate + m * ldc) + gate_bias);
    store(out.as<T>() + (first_row + m) * out.stride[0] + column,
          g * (load(up + m * ldc) + up_bias));
  }
}

// The packed columns of NR groups from `group` on; of a gated linear NR / 2 gates, then their ups.
template <class T, int NR>
RBLN_INLINE Groups<NR> groups_from(const Call& call, const LinearShape& s, int64_t group) {
  Groups<NR> groups;
  for (int n = 0; n < NR; ++n) {
    const int64_t half = s.gated && n >= NR / 2 ? s.groups - NR / 2 : 0;
    groups.start[n] = call[1].as<T>() + (group + n + half) * group_elements<T>(s.k);
  }
  return groups;
}

// Adds to a finished tile of NR groups from `group` on what the adapters of its rows add.
template <class T, int NR>
void adapt_tile(const Call& call, const LinearShape& s, int64_t group, float* c, int rows,
                int64_t first_row) {
  const int64_t width = call[call.count - 1].shape[1], ldc = NR * kLanes;
  if (!s.gated) {
    return add_adapters<T, NR>(call, {c, ldc, group * kLanes, width}, rows, first_row);
  }
  if constexpr (NR > 1) {
    const int64_t column = group * kLanes, columns = 2 * width;
    add_adapters<T, NR / 2>(call, {c, ldc, column, columns}, rows, first_row);
    float* up = c + NR / 2 * kLanes;
    add_adapters<T, NR / 2>(call, {up, ldc, column + width, columns}, rows, first_row);
  }
}

// Computes NR groups from `group` on, for all rows. While later rows are computed, which find the
// weights in the cache, the weights of the groups from `after` on are fetched, if it is not
// negative.
template <class T, int NR, int MR>
void linear_columns(const Call& call, const LinearShape& s, int64_t group, int64_t after,
                    float* scratch) {
  const Operand& x = call[0];
  float* c = scratch;
  float* row_buffer = scratch + kWideRows * 64;
  const Groups<NR> groups = groups_from<T, NR>(call, s, group);
  const Groups<NR> later = groups_from<T, NR>(call, s, std::max<int64_t>(after, 0));
  int fetched = after >= 0 ? 0 : NR;
  const int64_t blocks = (s.rows + MR - 1) / MR;
  const int64_t block = (s.rows + blocks - 1) / blocks;
  for (int64_t row = 0; row < s.rows; row += block) {
    const int rows = static_cast<int>(std::min(block, s.rows - row));
    int64_t ldx;
    const Row<T>* rows_x =
        as_rows(x.as<T>() + row * x.stride[0], x.stride[0], rows, s.k, row_buffer, &ldx);
    const void* ahead = row > 0 && fetched < NR ? later.start[fetched++] : nullptr;
    tile_rows<T, NR, MR>(rows, rows_x, ldx, groups, s.k, c, NR * kLanes, false,
                         static_cast<const char*>(ahead));
    if (s.adapted) adapt_tile<T, NR>(call, s, group, c, rows, row);
    if (s.gated) {
      for (int n = 0; n < NR / 2; ++n) {
        finish_gated<T>(call, c + n * kLanes, c + (n + NR / 2) * kLanes, NR * kLanes, rows, row,
                        (group + n) * kLanes);
      }
    } else {
      for (int n = 0; n < NR; ++n) {
        finish_column<T>(call, c + n * kLanes, NR * kLanes, rows, row, (group + n) * kLanes);
      }
    }
  }
}

template <class T>
void linear_task(const Call& call, const Shared& shared, int64_t task, float* scratch) {
  const LinearShape s = LinearShape::of(call, shared);
  const LinearTasks tasks = LinearTasks::of(s, group_bytes(call));
  int64_t group = tasks.start(task);
  const int64_t end = std::min(s.groups, tasks.start(task + 1));
  // What this thread will probably compute next, unless that is in another command.
  const int64_t next_task = task + shared.threads;
  const int64_t next = next_task < tasks.count ? tasks.start(next_task) : -1;
  const auto in_steps = [&](auto groups, auto rows) {
    constexpr int kGroups = groups(), kRows = rows();
    const int64_t step = s.gated ? kGroups / 2 : kGroups;
    for (; group + step <= end; group += step) {
      const int64_t after = group + step < end ? group + step : next;
      linear_columns<T, kGroups, kRows>(call, s, group, after, scratch);
    }
  };
  using std::integral_constant;
  using Wide = integral_constant<int, kWideRows>;
  if (s.rows <= kSlimRows) {
    in_steps(integral_constant<int, kSlimGroups>{}, integral_constant<int, kSlimRows>{});
  }
  in_steps(integral_constant<int, 2>{}, Wide{});
  if (!s.gated) in_steps(integral_constant<int, 1>{}, Wide{});
}

inline void linear_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  with_float_type(call[0].dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    linear_task<T>(call, shared, task, reinterpret_cast<float*>(scratch));
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
