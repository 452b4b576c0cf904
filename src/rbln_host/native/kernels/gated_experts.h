// SPDX-License-Identifier: Apache-2.0
// gated_experts: activation(gate) * up of each token's experts. Operands: input, weight, bias,
// experts, out.
#pragma once

#include <algorithm>

#include "expert_rows.h"

namespace rbln {
namespace RBLN_ISA {

constexpr int64_t kExpertTaskBytes = 256 * 1024;  // of weights, as in linear.h

struct GatedShape {
  int64_t k, groups, per_task, tasks;  // tasks: of one expert

  static GatedShape of(const Call& call) {
    GatedShape s;
    s.k = call[0].shape[1];
    s.groups = call[4].shape[2] / kLanes;
    const int64_t pair_bytes = 2 * kLanes * (s.k + 1) * size_of(call[0].dtype);
    s.per_task = std::max<int64_t>(1, kExpertTaskBytes / pair_bytes);
    s.per_task = std::min(s.groups, (s.per_task + 1) / 2 * 2);
    s.tasks = (s.groups + s.per_task - 1) / s.per_task;
    return s;
  }
};

inline int64_t gated_experts_plan(const Call& call, Shared& shared, int) {
  const int64_t tokens = in_use(call, shared, call[0].shape[0]);
  sort_by_expert(call[3], tokens, call[1].shape[0], shared.experts);
  return static_cast<int64_t>(shared.experts.used.size()) * GatedShape::of(call).tasks;
}

inline size_t gated_experts_scratch(const Call& call) {
  return static_cast<size_t>(expert_floats(call[0].shape[1])) * sizeof(float);
}

// activation(gate) * (up + offset) of one vector. A NaN passes the limits.
RBLN_INLINE Vec gated(const Call& call, Vec gate, Vec up) {
  if (call.limit > 0) {
    const Vec most = splat(call.limit);
    gate = vmin(most, gate);
    up = vmin(most, vmax(-most, up));
  }
  return activate(call.activation, gate) * (up + call.offset);
}

// Columns [group, group + NR / 2) of gates and their ups, for gathered rows.
template <class T, int NR, int MR>
void gated_tile(const Call& call, const GatedShape& s, int64_t expert, int64_t group,
                const Row<T>* x, const int32_t* places, int rows, float* c) {
  constexpr int kPairs = NR / 2;
  const Operand &bias = call[2], &out = call[4];
  int64_t numbers[NR];
  for (int n = 0; n < kPairs; ++n) {
    numbers[n] = group + n;
    numbers[n + kPairs] = s.groups + group + n;
  }
  const Groups<NR> groups = expert_groups<T, NR>(call[1], expert, numbers, s.k);
  tile_rows<T, NR, MR>(rows, x, s.k, groups, s.k, c, NR * kLanes, false);
  for (int n = 0; n < kPairs; ++n) {
    const int64_t column = (group + n) * kLanes;
    Vec gate_bias{}, up_bias{};
    if (bias.present) {
      const T* start = bias.as<T>() + expert * bias.stride[0];
      gate_bias = load(start + column);
      up_bias = load(start + s.groups * kLanes + column);
    }
    for (int m = 0; m < rows; ++m) {
      const float* at = c + m * NR * kLanes + n * kLanes;
      const Vec value = gated(call, load(at) + gate_bias, load(at + kPairs * kLanes) + up_bias);
      store(gated_row<T>(out, places[m]) + column, value);
    }
  }
}

// Columns [group, end) of one expert, for all of its rows.
template <class T, int NR, int MR>
void gated_expert(const Call& call, const GatedShape& s, const ExpertSpan& span,
                  const int32_t* places, int64_t group, int64_t end, float* scratch) {
  const Operand& x = call[0];
  const int64_t choices = call[4].shape[1];
  Row<T>* rows_x = reinterpret_cast<Row<T>*>(scratch + kMostTile * kLanes);
  for_blocks<MR>(span, [&](int64_t first, int rows) {
    for (int m = 0; m < rows; ++m) {
      const int64_t token = places[first + m] / choices;
      gather_row(x.as<T>() + token * x.stride[0], s.k, rows_x + m * s.k);
    }
    int64_t g = group;
    for (; g + NR / 2 <= end; g += NR / 2) {
      gated_tile<T, NR, MR>(call, s, span.expert, g, rows_x, places + first, rows, scratch);
    }
    for (; g < end; ++g) {
      gated_tile<T, 2, MR>(call, s, span.expert, g, rows_x, places + first, rows, scratch);
    }
  });
}

template <class T>
void gated_experts_task(const Call& call, const Shared& shared, int64_t task, float* scratch) {
  const GatedShape s = GatedShape::of(call);
  const ExpertSpan& span = shared.experts.used[task / s.tasks];
  const int32_t* places = shared.experts.places.data();
  const int64_t group = task % s.tasks * s.per_task;
  const int64_t end = std::min(s.groups, group + s.per_task);
  if (span.expert == call[1].shape[0]) {  // none
    for (int64_t i = span.start; i < span.end; ++i) {
      T* row = gated_row<T>(call[4], places[i]);
      std::fill(row + group * kLanes, row + end * kLanes, T{});
    }
  } else if (span.end - span.start <= kSlimRows) {
    gated_expert<T, kSlimGroups, kSlimRows>(call, s, span, places, group, end, scratch);
  } else {
    gated_expert<T, 2, kWideRows>(call, s, span, places, group, end, scratch);
  }
}

inline void gated_experts_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  with_float_type(call[0].dtype, [&](auto* type) {
    gated_experts_task<std::remove_pointer_t<decltype(type)>>(call, shared, task,
                                                              reinterpret_cast<float*>(scratch));
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
