// SPDX-License-Identifier: Apache-2.0
// One row's logits by temperature.
#pragma once

#include <algorithm>
#include <type_traits>

#include "weighed_blocks.h"

namespace rbln {
namespace RBLN_ISA {

class ScaledRow {
 public:
  // Memory for `memory.count` logits in whole blocks.
  explicit ScaledRow(const Weighted& memory) : set_(memory) {}

  const Weighted& set() const { return set_; }
  float most() const { return most_; }
  bool has_nan() const { return has_nan_; }

  template <class T>
  void read(const T* logits, float temperature) {
    Vec most = splat(-kInfinity);
    UVec size{};  // without the sign; as an integer, which is larger for a NaN than for infinity
    for_vectors(set_.count, [&](int64_t i, auto lanes) {
      const Vec v = load_some(logits + i, lanes) / temperature;
      store(set_.values + i, v);
      const UVec bits = bit_cast<UVec>(v) << 1;
      size = bits > size ? bits : size;
      if constexpr (std::is_same_v<decltype(lanes), AllLanes>) most = vmax(v, most);
    });
    std::fill(set_.values + set_.count, set_.values + whole_blocks(set_.count), -kInfinity);
    has_nan_ = any_of(bit_cast<IVec>(size > (0x7f800000u << 1)));
    const int64_t rest = set_.count / kLanes * kLanes;
    if (rest < set_.count) most = vmax(load(set_.values + rest), most);
    most_ = max_of(most);
  }

  int64_t first_nan() const {
    int64_t at = 0;
    while (set_.values[at] == set_.values[at]) ++at;
    return at;
  }

  // Where logits are infinite, those alone can be drawn.
  void only_infinite() {
    float* values = set_.values;
    for (int64_t i = 0; i < set_.count; ++i) values[i] = values[i] == kInfinity ? 0 : -kInfinity;
    most_ = 0;
  }

 private:
  Weighted set_;
  bool has_nan_ = false;
  float most_ = 0;
};

}  // namespace RBLN_ISA
}  // namespace rbln
