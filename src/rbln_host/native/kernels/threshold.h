// SPDX-License-Identifier: Apache-2.0
// The value at which a set, from the largest value down, counts or weighs as much as is asked for.
//
// Nothing is sorted: the values' range is split into parts, and the search goes on with the part
// that the value lies in.
#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"

namespace rbln {
namespace RBLN_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- sets of values: arrays whose last vector is filled up with -infinity and weight 0

// Values with their weights. Both arrays have room for 16 elements more than they hold.
struct Weighted {
  float* values;
  float* weights;
  int64_t count = 0;

  void fill_up() const {
    std::fill_n(values + count, kLanes, -kInfinity);
    std::fill_n(weights + count, kLanes, 0.0f);
  }
};

struct Range {
  float least = kInfinity, most = -kInfinity;
};

RBLN_INLINE float min_of(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return vmin(a, b); });
}

inline Range range_of(const Weighted& set) {
  Vec least = splat(kInfinity), most = splat(-kInfinity);
  for (int64_t i = 0; i < set.count; i += kLanes) {
    const Vec v = load(set.values + i);
    least = vmin(select(v > -kInfinity, v, splat(kInfinity)), least);
    most = vmax(v, most);
  }
  return {min_of(least), max_of(most)};
}

// What a value adds to its set's measure: its weight, or 1. Fillings add nothing.
template <bool kByWeight>
RBLN_INLINE Vec measure_of(const Weighted& set, int64_t i) {
  if constexpr (kByWeight) return load(set.weights + i);
  return select(load(set.values + i) > -kInfinity, splat(1.0f), Vec{});
}

// Splits a set's range into parts. The part is a growing function of the value, whatever rounding
// does, and the least and the largest value lie in different parts.
class Split {
 public:
  static constexpr int kParts = 64;

  // Many equal parts; two where the range is too large or too small for that.
  static Split of(Range range, int round) {
    const float scale = kParts / (range.most - range.least);
    if (!(scale > 0 && scale < kInfinity)) return in_two(range, round);
    return {range.least, scale};
  }

  int parts() const { return scale_ == 0 ? 2 : kParts; }

  // About the least value of a part.
  float edge(int part) const { return from_ + static_cast<float>(part) / scale_; }

  RBLN_INLINE IVec part_of(Vec v) const {
    if (scale_ == 0) return (v >= from_) & 1;
    const Vec part = (v - from_) * scale_;
    return __builtin_convertvector(vmin(vmax(part, Vec{}), splat(kParts - 1)), IVec);
  }

 private:
  Split(float from, float scale) : from_(from), scale_(scale) {}

  // Around the middle: by turns halfway in size, and halfway in the number of floats between, so
  // that no set takes more than about 64 rounds.
  static Split in_two(Range range, int round) {
    const float mean = 0.5f * range.least + 0.5f * range.most;
    const int64_t order = (order_of(range.least) + order_of(range.most) + 1) >> 1;
    const float middle = round % 2 ? of_order(order) : mean;
    return {middle > range.least ? middle : range.most, 0};
  }

  // Floats as integers of the same order.
  static int64_t order_of(float value) {
    const int32_t bits = bit_cast<int32_t>(value);
    return bits ^ (bits >> 31 & 0x7fffffff);
  }
  static float of_order(int64_t order) {
    const int32_t bits = static_cast<int32_t>(order);
    return bit_cast<float>(bits ^ (bits >> 31 & 0x7fffffff));
  }

  float from_, scale_;
};

// The measure of each part. Each lane has a column of its own, so that no addition waits for the
// one before.
template <bool kByWeight>
void measure(const Weighted& set, const Split& split, double* parts) {
  alignas(64) double columns[Split::kParts][kLanes];
  std::memset(columns, 0, static_cast<size_t>(split.parts()) * sizeof(columns[0]));
  for (int64_t i = 0; i < set.count; i += kLanes) {
    alignas(64) int32_t part[kLanes];
    alignas(64) float measures[kLanes];
    const IVec parts_of_lanes = split.part_of(load(set.values + i));
    std::memcpy(part, &parts_of_lanes, sizeof(part));
    store(measures, measure_of<kByWeight>(set, i));
    for (int lane = 0; lane < kLanes; ++lane) columns[part[lane]][lane] += measures[lane];
  }
  for (int part = 0; part < split.parts(); ++part) {
    LaneSums sums;
    std::memcpy(&sums, columns[part], sizeof(sums));
    parts[part] = sums.total();
  }
}

// Moves one part of a set into another, in order. Both may be in one memory.
template <bool kByWeight>
void keep(const Weighted& set, const Split& split, int part, Weighted& kept) {
  int64_t count = 0;
  for (int64_t i = 0; i < set.count; i += kLanes) {
    const Vec v = load(set.values + i);
    const uint32_t hits = bits_of((split.part_of(v) == part) & (v > -kInfinity));
    if constexpr (kByWeight) compress(kept.weights + count, load(set.weights + i), hits);
    count += compress(kept.values + count, v, hits);
  }
  kept.count = count;
  kept.fill_up();
}

// The same as `threshold`, of at most 16 values, where `above` counts for all that are larger.
template <bool kByWeight>
float threshold_of_few(const Weighted& set, float least, double above, double target) {
  const Vec v = load(set.values), measures = measure_of<kByWeight>(set, 0);
  float found = least;
  for (int64_t i = 0; i < set.count; ++i) {
    const float value = set.values[i];
    LaneSums sums;
    sums.add(select(v >= value, measures, Vec{}));
    if (value > found && above + sums.total() >= target) found = value;
  }
  return found;
}

// The largest of the values such that all that are at least as large count, or weigh, `target` or
// more; the least of them when all together do not. `work` is memory for the search, and may be the
// set itself, which is used up then.
template <bool kByWeight>
float threshold(Weighted set, Weighted work, double target) {
  double above = 0;
  double parts[Split::kParts];
  Range range = range_of(set);
  for (int round = 0; range.least < range.most; ++round) {
    if (set.count <= kLanes) return threshold_of_few<kByWeight>(set, range.least, above, target);
    const Split split = Split::of(range, round);
    measure<kByWeight>(set, split, parts);
    int part = split.parts() - 1;
    while (part > 0 && above + parts[part] < target) above += parts[part--];
    keep<kByWeight>(set, split, part, work);
    set = work;
    range = range_of(set);
  }
  return range.least;
}

}  // namespace RBLN_ISA
}  // namespace rbln
