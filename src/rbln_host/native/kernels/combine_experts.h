// SPDX-License-Identifier: Apache-2.0
// combine_experts: the weighed sum of each token's experts. Operands: gated, weight, bias, experts,
// weights, out.
#pragma once

#include <algorithm>

#include "expert_rows.h"

namespace rbln {
namespace RBLN_ISA {

constexpr int kCombined = 4;  // groups of columns of a task

inline int64_t combine_experts_plan(const Call& call, Shared& shared, int) {
  const int64_t tokens = in_use(call, shared, call[0].shape[0]);
  sort_by_expert(call[3], tokens, call[1].shape[0], shared.experts);
  return tokens ? (call[1].shape[1] + kCombined - 1) / kCombined : 0;
}

// A tile and its rows, then the sums of a task's columns for every token.
inline size_t combine_experts_scratch(const Call& call) {
  const int64_t sums = call[0].shape[0] * kCombined * kLanes;
  return static_cast<size_t>(expert_floats(call[0].shape[2]) + sums) * sizeof(float);
}

// Adds weight * (x . columns + bias) of NR groups from `group` on to the tokens' sums.
template <class T, int NR, int MR>
void combine_tile(const Call& call, int64_t expert, int64_t group, const Row<T>* x,
                  const int32_t* places, int rows, float* c, float* sums) {
  const Operand &bias = call[2], &weights = call[4], &out = call[5];
  const int64_t k = call[0].shape[2], choices = weights.shape[1];
  int64_t numbers[NR];
  for (int n = 0; n < NR; ++n) numbers[n] = group + n;
  const Groups<NR> groups = expert_groups<T, NR>(call[1], expert, numbers, k);
  tile_rows<T, NR, MR>(rows, x, k, groups, k, c, NR * kLanes, false);
  for (int m = 0; m < rows; ++m) {
    const int64_t token = places[m] / choices;
    const T* own = weights.as<T>() + token * weights.stride[0] + places[m] % choices;
    const Vec weight = splat(to_float(*own));
    float* total = sums + token * kCombined * kLanes;
    for (int n = 0; n < NR; ++n) {
      const int64_t column = (group + n) * kLanes;
      Vec value = load(c + (m * NR + n) * kLanes);
      if (bias.present) {
        const T* start = bias.as<T>() + expert * bias.stride[0] + column;
        value += load_some(start, std::min<int64_t>(kLanes, out.shape[1] - column));
      }
      store(total + n * kLanes, load(total + n * kLanes) + weight * value);
    }
  }
}

// Groups [group, end), at most kCombined, of one expert.
template <class T, int NR, int MR>
void combine_expert(const Call& call, const ExpertSpan& span, const int32_t* places, int64_t group,
                    int64_t end, float* scratch, float* sums) {
  const int64_t k = call[0].shape[2];
  Row<T>* rows_x = reinterpret_cast<Row<T>*>(scratch + kMostTile * kLanes);
  for_blocks<MR>(span, [&](int64_t first, int rows) {
    for (int m = 0; m < rows; ++m) {
      gather_row(gated_row<const T>(call[0], places[first + m]), k, rows_x + m * k);
    }
    int64_t g = group;
    for (; g + NR <= end; g += NR) {
      combine_tile<T, NR, MR>(call, span.expert, g, rows_x, places + first, rows, scratch,
                              sums + (g - group) * kLanes);
    }
    for (; g < end; ++g) {
      combine_tile<T, 1, MR>(call, span.expert, g, rows_x, places + first, rows, scratch,
                             sums + (g - group) * kLanes);
    }
  });
}

template <class T>
void combine_experts_task(const Call& call, const Shared& shared, int64_t task, float* scratch) {
  const Operand& out = call[5];
  const int64_t tokens = in_use(call, shared, call[0].shape[0]);
  const int64_t group = task * kCombined;
  const int64_t end = std::min(call[1].shape[1], group + kCombined);
  float* sums = scratch + expert_floats(call[0].shape[2]);
  std::fill(sums, sums + tokens * kCombined * kLanes, 0.0f);
  const int32_t* places = shared.experts.places.data();
  for (const ExpertSpan& span : shared.experts.used) {
    if (span.expert == call[1].shape[0]) continue;  // none
    if (span.end - span.start <= kSlimRows) {
      combine_expert<T, kSlimGroups, kSlimRows>(call, span, places, group, end, scratch, sums);
    } else {
      combine_expert<T, 2, kWideRows>(call, span, places, group, end, scratch, sums);
    }
  }
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t g = group; g < end; ++g) {
      const int64_t column = g * kLanes;
      store_some(out.as<T>() + token * out.stride[0] + column,
                 load(sums + (token * kCombined + g - group) * kLanes),
                 std::min<int64_t>(kLanes, out.shape[1] - column));
    }
  }
}

inline void combine_experts_run(const Call& call, Shared& shared, int64_t task,
                                std::byte* scratch) {
  with_float_type(call[0].dtype, [&](auto* type) {
    combine_experts_task<std::remove_pointer_t<decltype(type)>>(call, shared, task,
                                                                reinterpret_cast<float*>(scratch));
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
