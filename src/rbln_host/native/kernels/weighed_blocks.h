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

  // Sets what each block weighs; `weights(i)` gives the weights of the vector at i.
  template <class F>
  void sum(F weights) const {
    for_blocks(set.count, [&](int64_t block, int64_t first, int64_t) {
      blocks[block] = sum_of_block([&](int64_t at) { return weights(first + at); });
    });
  }

  // Sets all weights.
  void weigh() const {
    sum([this](int64_t i) {
      const Vec w = weight_of(load(set.values + i));
      store(set.weights + i, w);
      return w;
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
