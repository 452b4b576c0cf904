// SPDX-License-Identifier: Apache-2.0
// A draw from one row of logits, by temperature, top-k and top-p.
//
// Tokens that can surely not be drawn are left out as early as possible: what follows costs as much
// as there are tokens that may be.
#pragma once

#include <algorithm>
#include <cfloat>

#include "scaled_row.h"
#include "top_p.h"

namespace rbln {
namespace RBLN_ISA {

// Memory for one row.
struct SampleScratch {
  Weighted row, kept, work;  // logits by temperature; those that may be drawn; for searches
  int32_t* ids;              // of those that may be drawn
  int32_t* ends;             // a number a block of tokens
  double* blocks;            // what each block weighs

  SampleScratch(std::byte* memory, int64_t width) {
    blocks = reinterpret_cast<double*>(memory);
    ends = reinterpret_cast<int32_t*>(blocks + block_room(width));
    float* next = reinterpret_cast<float*>(ends + 2 * block_room(width));
    for (Weighted* set : {&row, &kept, &work}) {
      *set = {next, next + room(width)};
      next += 2 * room(width);
    }
    ids = reinterpret_cast<int32_t*>(next);
  }
  static int64_t room(int64_t width) { return whole_blocks(width) + kLanes; }
  static int64_t block_room(int64_t width) { return (width / kBlock + 8) / 8 * 8; }
  static size_t bytes(int64_t width) {
    return static_cast<size_t>(2 * block_room(width)) * sizeof(double) +
           7 * static_cast<size_t>(room(width)) * sizeof(float);
  }
};

struct Parameters {
  float temperature;
  int64_t top_k;
  float top_p;
  double uniform;
};

struct Drawn {
  int64_t token;
  float threshold;  // the least scaled logit that could be drawn
};

// Draws one of `count` logits.
class RowSampler {
 public:
  RowSampler(const SampleScratch& scratch, int64_t count)
      : s_(scratch), row_({s_.row.values, s_.row.weights, count}) {}

  template <class T>
  Drawn draw(const T* logits, const Parameters& by) {
    const float temperature = std::min(by.temperature, FLT_MAX);
    const bool cuts = by.top_k > 0 && by.top_k < row_.set().count;
    row_.read(logits, temperature);
    if (row_.has_nan()) return {row_.first_nan(), -kInfinity};
    if (row_.most() == -kInfinity) return {0, -kInfinity};
    const bool infinite = row_.most() == kInfinity;
    if (infinite) row_.only_infinite();
    Drawn drawn = cuts ? of_best(by) : of_all(by);
    if (infinite && drawn.threshold > -kInfinity) drawn.threshold = kInfinity;
    return drawn;
  }

 private:
  Drawn of_all(const Parameters& by) {
    const WeighedBlocks row{row_.set(), row_.most(), s_.blocks};
    if (by.top_p < 1.0f) {
      row.weigh();
      return of_heaviest(row, -kInfinity, s_.kept, by);
    }
    const auto weights = [&](int64_t i) { return row.weight_of(load(row.set.values + i)); };
    row.sum(weights);
    return {pick(row.set.count, weights, by.uniform, row.blocks), -kInfinity};
  }

  Drawn of_best(const Parameters& by) {
    const float least = best(by.top_k);
    const WeighedBlocks kept{s_.kept, row_.most(), s_.blocks};
    kept.fill_up();
    kept.weigh();
    Drawn drawn = of_heaviest(kept, least, s_.row, by);
    drawn.token = s_.ids[drawn.token];
    return drawn;
  }

  // Of a set with no values below `least`: of its heaviest, which weigh p of it.
  Drawn of_heaviest(const WeighedBlocks& of, float least, const Weighted& memory,
                    const Parameters& by) const {
    if (by.top_p < 1.0f) {
      TopP top_p(of, {memory, s_.work, s_.ends});
      least = std::max(least, top_p.cut(std::max(by.top_p, 0.0f)));
    }
    const auto weights = [&](int64_t i) {
      return select(load(of.set.values + i) >= least, load(of.set.weights + i), Vec{});
    };
    return {pick(of.set.count, weights, by.uniform, of.blocks), least};
  }

  // ---- top-k

  // Keeps the values that are at least the k-th largest; returns the least of them.
  float best(int64_t k) {
    at_least(bound_of(k));
    const float least = threshold<false>(s_.kept, s_.work, static_cast<double>(k));
    again(least);
    return least;
  }

  // A value that at least k values reach: the k-th largest of the largest of many groups.
  float bound_of(int64_t k) {
    const int64_t vectors = row_.set().count / kLanes;
    const int64_t size = std::max<int64_t>(1, vectors * kLanes / (4 * k));  // vectors in a group
    const int64_t groups = vectors / size * kLanes;
    if (size < 2 || groups < k) return -FLT_MAX;
    for (int64_t group = 0; group < groups; group += kLanes) {
      const float* from = row_.set().values + group * size;
      Vec most = load(from);
      for (int64_t i = 1; i < size; ++i) most = vmax(load(from + i * kLanes), most);
      store(s_.work.values + group, vmax(most, splat(-FLT_MAX)));
    }
    const Weighted set{s_.work.values, s_.work.weights, groups};
    set.fill_up();
    return threshold<false>(set, set, static_cast<double>(k));
  }

  // Of the kept values and ids those that are `bound` or more.
  void again(float bound) {
    int64_t count = 0;
    for (int64_t i = 0; i < s_.kept.count; i += kLanes) {
      const Vec v = load(s_.kept.values + i);
      const uint32_t hits = bits_of(v >= bound);
      IVec ids;
      std::memcpy(&ids, s_.ids + i, sizeof(ids));
      compress(s_.ids + count, ids, hits);
      count += compress(s_.kept.values + count, v, hits);
    }
    s_.kept.count = count;
  }

  // Keeps the values and ids of the tokens that reach `bound`.
  void at_least(float bound) {
    s_.kept.count = 0;
    for_blocks(row_.set().count, [&](int64_t, int64_t first, int64_t end) {
      Vec largest = splat(-kInfinity);
      for (int64_t i = first; i < end; i += kLanes) {
        largest = vmax(load(row_.set().values + i), largest);
      }
      if (any_of(largest >= bound)) append(first, end, bound);
    });
    s_.kept.fill_up();
  }

  void append(int64_t first, int64_t end, float bound) {
    int64_t count = s_.kept.count;
    for (int64_t i = first; i < end; i += kLanes) {
      const Vec v = load(row_.set().values + i);
      const uint32_t hits = bits_of(v >= bound);
      compress(s_.ids + count, kLaneIds + static_cast<int32_t>(i), hits);
      count += compress(s_.kept.values + count, v, hits);
    }
    s_.kept.count = count;
  }

  SampleScratch s_;
  ScaledRow row_;
};

}  // namespace RBLN_ISA
}  // namespace rbln
