// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts: route, gated_experts and combine_experts.
//
// A plan sorts the rows of a step by expert, so that each expert's weights are read once, for all
// of its rows, and those of experts without rows not at all. Every element is one chain of
// multiply-adds, and a token's experts are added up in the order of their numbers, so a row's
// result depends neither on the rows beside it nor on the number of threads.
#pragma once

#include <algorithm>

#include "tile.h"

namespace rbln {
namespace RBLN_ISA {

// ---- route: logits, weights, experts

// Room for a row of logits as floats, then the scores that were chosen.
inline size_t route_scratch(const Call& call) {
  const int64_t chosen = call[1].last() + kLanes;
  return static_cast<size_t>(call[0].last() + kLanes + chosen) * sizeof(float);
}

// Whether a score goes before another that comes after it. A NaN goes before all numbers, so that
// there is an order and every row gets experts that exist.
RBLN_INLINE bool goes_before(float a, float b) { return b != b ? false : a != a || a > b; }

// The numbers of the `count` largest scores, the largest first and of equals the first.
inline void choose(const float* scores, int64_t size, int64_t count, int64_t* chosen,
                   int64_t stride) {
  for (int64_t i = 0; i < size; ++i) {
    int64_t place = std::min(i, count);
    while (place > 0 && goes_before(scores[i], scores[chosen[(place - 1) * stride]])) {
      if (place < count) chosen[place * stride] = chosen[(place - 1) * stride];
      --place;
    }
    if (place < count) chosen[place * stride] = i;
  }
}

// Replaces scores by e^(score - top) and returns their sum.
RBLN_INLINE float exponentials(float* scores, int64_t count, float top) {
  Vec total{};
  for_vectors(count, [&](int64_t i, auto lanes) {
    const Vec e = vexp(load_some(scores + i, lanes) - top);
    store_some(scores + i, e, lanes);
    float counted[kLanes] = {};
    store_some(counted, e, lanes);
    total += load(counted);
  });
  return sum(total);
}

template <class T>
void route_row(const Call& call, int64_t row, float* all) {
  const Operand &logits = call[0], &weights = call[1], &experts = call[2];
  const int64_t size = logits.shape[1], count = weights.shape[1];
  float* some = all + size + kLanes;
  const T* x = logits.as<T>() + row * logits.stride[0];
  for_vectors(size,
              [&](int64_t i, auto lanes) { store_some(all + i, load_some(x + i, lanes), lanes); });
  int64_t* chosen = experts.as<int64_t>() + row * experts.stride[0];
  choose(all, size, count, chosen, experts.stride[1]);
  for (int64_t i = 0; i < count; ++i) some[i] = all[chosen[i * experts.stride[1]]];
  const float top = some[0];
  const float over_some = exponentials(some, count, top);
  const float total = call.renormalise ? over_some : exponentials(all, size, top);
  T* out = weights.as<T>() + row * weights.stride[0];
  for_vectors(count, [&](int64_t i, auto lanes) {
    store_some(out + i, load_some(some + i, lanes) / total, lanes);
  });
}

constexpr int64_t kRoutedRows = 8;  // of a task

inline int64_t route_plan(const Call& call, Shared& shared, int) {
  return (in_use(call, shared, call[0].shape[0]) + kRoutedRows - 1) / kRoutedRows;
}

inline void route_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  const int64_t rows = in_use(call, shared, call[0].shape[0]);
  const int64_t end = std::min(rows, (task + 1) * kRoutedRows);
  with_float_type(call[0].dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t row = task * kRoutedRows; row < end; ++row) {
      route_row<T>(call, row, reinterpret_cast<float*>(scratch));
    }
  });
}

// ---- rows by expert

// Sorts the places [token, choice] of the tokens in use by their expert, and in their order.
inline void sort_by_expert(const Operand& experts, int64_t tokens, int64_t count,
                           ExpertRows& rows) {
  const int64_t choices = experts.shape[1];
  const auto expert_of = [&](int64_t token, int64_t choice) {
    const int64_t at = token * experts.stride[0] + choice * experts.stride[1];
    const int64_t expert =
        experts.dtype == DType::kInt64 ? experts.as<int64_t>()[at] : experts.as<int32_t>()[at];
    return expert >= 0 && expert < count ? expert : count;  // count: none
  };
  rows.next.assign(count + 1, 0);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t choice = 0; choice < choices; ++choice) ++rows.next[expert_of(token, choice)];
  }
  rows.used.clear();
  int32_t start = 0;
  for (int64_t expert = 0; expert <= count; ++expert) {
    const int32_t size = rows.next[expert];
    if (size) rows.used.push_back({static_cast<int32_t>(expert), start, start + size});
    rows.next[expert] = start;
    start += size;
  }
  rows.places.resize(start);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t choice = 0; choice < choices; ++choice) {
      rows.places[rows.next[expert_of(token, choice)]++] =
          static_cast<int32_t>(token * choices + choice);
    }
  }
}

// Columns of one expert's packed weight.
template <class T, int NR>
RBLN_INLINE Groups<NR> expert_groups(const Operand& weight, int64_t expert, const int64_t* group,
                                     int64_t k) {
  Groups<NR> groups;
  const T* start = weight.as<T>() + expert * weight.shape[1] * group_elements<T>(k);
  for (int n = 0; n < NR; ++n) groups.start[n] = start + group[n] * group_elements<T>(k);
  return groups;
}

// A copy of a row as the micro-kernel wants it.
template <class T>
RBLN_INLINE void gather_row(const T* x, int64_t k, Row<T>* to) {
  if constexpr (std::is_same_v<Row<T>, T>) {
    std::memcpy(to, x, static_cast<size_t>(k) * sizeof(T));
  } else {
    for_vectors(k,
                [&](int64_t i, auto lanes) { store_some(to + i, load_some(x + i, lanes), lanes); });
  }
}

constexpr int kMostTile =
    kWideRows * 2 > kSlimRows* kSlimGroups ? kWideRows * 2 : kSlimRows * kSlimGroups;

// Floats for a tile and for the gathered rows of a block.
inline int64_t expert_floats(int64_t k) { return kMostTile * kLanes + kWideRows * (k + kLanes); }

// Calls `function(first, rows)` for blocks of at most MR rows of an expert, as even as can be.
template <int MR, class F>
RBLN_INLINE void for_blocks(const ExpertSpan& span, F function) {
  const int64_t count = span.end - span.start;
  const int64_t blocks = (count + MR - 1) / MR;
  const int64_t block = (count + blocks - 1) / blocks;
  for (int64_t first = 0; first < count; first += block) {
    function(span.start + first, static_cast<int>(std::min(block, count - first)));
  }
}

// ---- gated_experts: input, weight, bias, experts, out

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

template <class T>
T* gated_row(const Operand& out, int64_t place) {
  const int64_t choices = out.shape[1];
  return out.as<T>() + place / choices * out.stride[0] + place % choices * out.stride[1];
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

// ---- combine_experts: gated, weight, bias, experts, weights, out

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
