// SPDX-License-Identifier: Apache-2.0
// The rows of a mixture of experts, sorted by expert.
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

// The row of a place, where each token has a row for each of its choices.
template <class T>
T* gated_row(const Operand& out, int64_t place) {
  const int64_t choices = out.shape[1];
  return out.as<T>() + place / choices * out.stride[0] + place % choices * out.stride[1];
}

}  // namespace RBLN_ISA
}  // namespace rbln
