// SPDX-License-Identifier: Apache-2.0
// The heaviest of a set that weigh a share of it.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "weighed_blocks.h"

namespace rbln {
namespace RBLN_ISA {

// Memory for a search: for two sets as large as that searched, and for a number a block.
struct SearchMemory {
  Weighted between, work;
  int32_t* ends;
};

// The search begins with the few values between which the threshold is likely to lie, judging by
// some of the set. It goes through all if it does not lie there.
class TopP {
 public:
  TopP(const WeighedBlocks& of, const SearchMemory& memory)
      : of_(of), between_(memory.between), work_(memory.work), ends_(memory.ends) {}

  // The largest value such that it and all larger ones weigh p of the set. Afterwards the weight of
  // a block is of those alone.
  float cut(double p) {
    const double total = of_.total(), target = p * total, below = (1.0 - p) * total;
    Range range = likely(below);
    // What does not exceed the threshold weighs more than `below`, and no value more than it does.
    const double average = below / static_cast<double>(of_.set.count);
    range.least = std::max(range.least, of_.one + static_cast<float>(std::log(average)) - 1e-3f);
    if (!take_out(range, target)) take_out(kEverything, target);
    const float least = threshold<true>(between_, work_, target - above_);
    put_back(least);
    return least;
  }

 private:
  static constexpr Range kEverything{-FLT_MAX, kInfinity};
  static constexpr int kParts = Split::kParts;

  // Values between which the threshold is likely to lie, if all below it weigh `below`: those below
  // which some of the set weigh as much for their number, and a few deviations less and more.
  Range likely(double below) {
    constexpr int64_t kVectors = 96, kFewest = 16;
    const int64_t step = std::max<int64_t>(8, of_.set.count / kLanes / kVectors) * kLanes;
    if (of_.set.count < kFewest * step) return kEverything;
    const Weighted some = every(step);
    const Range range = range_of(some);
    // What lies further below weighs nothing.
    const Split split = Split::of({std::max(range.least, range.most - 30), range.most}, 0);
    if (split.parts() < kParts) return kEverything;
    double parts[kParts];
    measure<true>(some, split, parts);
    below *= static_cast<double>(some.count) / static_cast<double>(of_.set.count);
    const double room = 1.05 + 4 * deviation(some, split.edge(parts_of(parts, below) + 1));
    int least = parts_of(parts, below / room), most = parts_of(parts, below * room) + 1;
    // Where some of the set have nothing, all may have something.
    while (least > 0 && parts[least - 1] == 0) --least;
    while (most < kParts && parts[most] == 0) ++most;
    return {least > 0 ? split.edge(least) : -FLT_MAX, most < kParts ? split.edge(most) : kInfinity};
  }

  // How many parts, from that of the least values on, weigh no more than `weight` together.
  static int parts_of(const double* parts, double weight) {
    int count = 0;
    double sum = 0;
    while (count < kParts && (sum += parts[count]) <= weight) ++count;
    return count;
  }

  // A vector every `step` values.
  Weighted every(int64_t step) const {
    Weighted some{between_.values, between_.weights};
    for (int64_t i = 0; i + kLanes <= of_.set.count; i += step) {
      store(some.values + some.count, load(of_.set.values + i));
      store(some.weights + some.count, load(of_.set.weights + i));
      some.count += kLanes;
    }
    some.fill_up();
    return some;
  }

  // By how much the weight of values up to `most` varies among choices as large as this, as a share
  // of it.
  static double deviation(const Weighted& some, float most) {
    LaneSums sum, squares;
    for (int64_t i = 0; i < some.count; i += kLanes) {
      const Vec w = select(load(some.values + i) <= most, load(some.weights + i), Vec{});
      sum.add(w);
      squares.add(w * w);
    }
    return std::sqrt(squares.total()) / sum.total();
  }

  // Leaves in the weight of a block what reaches the range's most, and copies the values of the
  // range; says whether the threshold is among these.
  bool take_out(const Range& range, double target) {
    above_ = 0;
    between_.count = 0;
    const double lightest = 0.999 * of_.weight_of(splat(range.least))[0];
    for_blocks(of_.set.count, [&](int64_t block, int64_t first, int64_t) {
      if (of_.blocks[block] < lightest) {
        of_.blocks[block] = 0;
        ends_[block] = static_cast<int32_t>(between_.count);
        return;
      }
      const float *values = of_.set.values + first, *weights = of_.set.weights + first;
      int64_t count = between_.count;
      of_.blocks[block] = sum_of_block([&](int64_t at) {
        const Vec v = load(values + at);
        const uint32_t hits = bits_of((v >= range.least) & (v < range.most));
        count += compress(between_.values + count, v, hits);
        return select(v >= range.most, load(weights + at), Vec{});
      });
      above_ += of_.blocks[block];
      between_.count = ends_[block] = static_cast<int32_t>(count);
    });
    const double reached = above_ + weigh_between();
    return above_ < target && target <= reached;
  }

  double weigh_between() const {
    between_.fill_up();
    LaneSums sums;
    for (int64_t i = 0; i < between_.count; i += kLanes) {
      const Vec w = of_.weight_of(load(between_.values + i));
      store(between_.weights + i, w);
      sums.add(w);
    }
    return sums.total();
  }

  // Adds to the weight of each block what was taken out and reaches `least`.
  void put_back(float least) const {
    int32_t i = 0;
    for_blocks(of_.set.count, [&](int64_t block, int64_t, int64_t) {
      LaneSums sums;
      for (const int32_t end = ends_[block]; i < end; i += kLanes) {
        const IVec in = (load(between_.values + i) >= least) & (kLaneIds + i < end);
        sums.add(select(in, load(between_.weights + i), Vec{}));
      }
      i = ends_[block];
      of_.blocks[block] += sums.total();
    });
  }

  WeighedBlocks of_;
  Weighted between_, work_;
  int32_t* ends_;
  double above_ = 0;
};

}  // namespace RBLN_ISA
}  // namespace rbln
