// SPDX-License-Identifier: Apache-2.0
// Values in whole blocks, each weighing e^value, with the weight of each block.
#pragma once

#include <algorithm>

#include "pick.h"
#include "threshold.h"

namespace rbln {
namespace RBLN_ISA {

// The last block is filled up with -infinity.
struct WeighedBlocks {
  Weighted set;
  float one;  // the value that weighs 1: another weighs e^(value - one)
  double* blocks;

  RBLN_INLINE Vec weight_of(Vec value) const { return vexp_fast(value - one); }

  // Sets the weights of the vector `v` at i, and returns them.
  RBLN_INLINE Vec weigh(int64_t i, Vec v) const {
    const Vec w = weight_of(v);
    store(set.weights + i, w);
    return w;
  }

  // Sets all weights.
  void weigh() const {
    for_blocks(set.count, [&](int64_t block, int64_t first, int64_t) {
      blocks[block] = sum_of_block(
          [&](int64_t at) { return weigh(first + at, load(set.values + first + at)); });
    });
  }

  void fill_up() const {
    std::fill(set.values + set.count, set.values + whole_blocks(set.count), -kInfinity);
  }

  double total() const {
    double sum = 0;
    for_blocks(set.count, [&](int64_t block, int64_t, int64_t) { sum += blocks[block]; });
    return sum;
  }
};

}  // namespace RBLN_ISA
}  // namespace rbln
