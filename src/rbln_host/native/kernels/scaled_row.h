// SPDX-License-Identifier: Apache-2.0
// One row's logits by temperature, and what each of them weighs beside the others.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "weighed_blocks.h"

namespace rbln {
namespace RBLN_ISA {

class ScaledRow {
 public:
  // Memory for `memory.count` logits in whole blocks, and for a number a block.
  ScaledRow(const Weighted& memory, double* blocks) : of_({memory, 0, blocks}) {}

  const WeighedBlocks& weighed() const { return of_; }
  const Weighted& set() const { return of_.set; }
  float most() const { return most_; }
  bool has_nan() const { return has_nan_; }

  // Takes the logits, and weighs them in the same pass if that is asked for: against the largest of
  // some of them, since the largest of all is not known yet.
  template <bool kWeigh, class T>
  void read(const T* logits, float temperature) {
    of_.one = kWeigh ? largest_of_some(logits) / temperature : 0;
    Vec most = splat(-kInfinity);
    UVec size{};  // without the sign; as an integer, which is larger for a NaN than for infinity
    const auto take = [&](int64_t i, auto lanes) {
      Vec v = load_some(logits + i, lanes) / temperature;
      if constexpr (!std::is_same_v<decltype(lanes), AllLanes>)
        v = select(kLaneIds < static_cast<int32_t>(lanes), v, splat(-kInfinity));
      store(of_.set.values + i, v);
      most = vmax(v, most);
      const UVec bits = bit_cast<UVec>(v) << 1;
      size = bits > size ? bits : size;
      if constexpr (kWeigh) return of_.weigh(i, v);
      return Vec{};
    };
    for_blocks(of_.set.count, [&](int64_t block, int64_t first, int64_t end) {
      const auto whole = [&](int64_t at) { return take(first + at, AllLanes{}); };
      const auto rest = [&](int64_t at) {
        return take(first + at, std::clamp<int64_t>(end - first - at, 0, kLanes));
      };
      of_.blocks[block] = end - first == kBlock ? sum_of_block(whole) : sum_of_block(rest);
    });
    most_ = max_of(most);
    has_nan_ = any_of(bit_cast<IVec>(size > (0x7f800000u << 1)));
  }

  int64_t first_nan() const {
    int64_t at = 0;
    while (of_.set.values[at] == of_.set.values[at]) ++at;
    return at;
  }

  // Where logits are infinite, those alone can be drawn.
  void only_infinite() {
    float* values = of_.set.values;
    for (int64_t i = 0; i < of_.set.count; ++i) values[i] = values[i] == kInfinity ? 0 : -kInfinity;
    most_ = 0;
  }

  // Weighs the row once more if the value that weighs 1 is too far from the largest.
  void weigh_again_if_far() {
    constexpr float kFar = 40;
    if (std::abs(most_ - of_.one) <= kFar) return;
    of_.one = most_;
    of_.weigh();
  }

 private:
  template <class T>
  float largest_of_some(const T* logits) const {
    Vec most = splat(-FLT_MAX);
    for (int64_t i = 0; i + kLanes <= of_.set.count; i += 32 * kLanes)
      most = vmax(load(logits + i), most);
    return max_of(most);
  }

  WeighedBlocks of_;
  bool has_nan_ = false;
  float most_ = 0;
};

}  // namespace RBLN_ISA
}  // namespace rbln
