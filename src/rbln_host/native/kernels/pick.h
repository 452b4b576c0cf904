// SPDX-License-Identifier: Apache-2.0
// Which of many weighted items a random number falls on.
#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"

namespace rbln {
namespace RBLN_ISA {

constexpr int64_t kBlock = 16 * kLanes;

RBLN_INLINE int64_t whole_blocks(int64_t count) { return (count + kBlock - 1) / kBlock * kBlock; }

// Calls `function(block, first, end)` for each block of `count` items.
template <class F>
RBLN_INLINE void for_blocks(int64_t count, F function) {
  for (int64_t block = 0; block * kBlock < count; ++block) {
    function(block, block * kBlock, std::min(count, (block + 1) * kBlock));
  }
}

// The first of a block at which the running sum of weights exceeds `left`; by rounding there may be
// none, then the last that weighs anything; -1 where none does.
template <class F>
int64_t pick_of_block(int64_t first, int64_t end, F weights, double left) {
  float block[kBlock];
  for (int64_t i = first; i < end; i += kLanes) store(block + i - first, weights(i));
  int64_t last = -1;
  for (int64_t i = first; i < end; ++i) {
    const float weight = block[i - first];
    if (weight == 0) continue;
    if (left < weight) return i;
    left -= weight;
    last = i;
  }
  return last;
}

// What a whole block weighs; `weights(at)` gives the vector `at` items after the block's first.
template <class F>
RBLN_INLINE double sum_of_block(F weights) {
  LaneSums sums;
  for (int64_t at = 0; at < kBlock; at += kLanes) sums.add(weights(at));
  return sums.total();
}

// The first of `count` items at which the running sum of their weights exceeds `uniform` of the
// whole. `weights(i)` gives those of the vector at i, zeros beyond the count; `blocks` what each
// block of them weighs.
template <class F>
int64_t pick(int64_t count, F weights, double uniform, const double* blocks) {
  double total = 0;
  for_blocks(count, [&](int64_t block, int64_t, int64_t) { total += blocks[block]; });
  double left = uniform * total;
  int64_t block = 0;
  const int64_t last = (count - 1) / kBlock;
  while (block < last && blocks[block] <= left) left -= blocks[block++];
  int64_t at = -1;
  for (; at < 0 && block >= 0; --block) {
    at = pick_of_block(block * kBlock, std::min(count, (block + 1) * kBlock), weights, left);
    // Where the block weighs nothing: the last item before it that does.
    left = std::numeric_limits<double>::infinity();
  }
  return std::max<int64_t>(at, 0);
}

}  // namespace RBLN_ISA
}  // namespace rbln
