// SPDX-License-Identifier: Apache-2.0
// A draw from one row of logits, by temperature, top-k and top-p.
//
// Tokens that can surely not be drawn are left out as early as possible: what follows costs as much
// as there are tokens that may be.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "pick.h"
#include "threshold.h"

namespace rbln {
namespace RBLN_ISA {

// Memory for one row.
struct SampleScratch {
  float *scaled, *weights;     // logits by temperature, and their weights
  float *kept, *kept_weights;  // of tokens that may be drawn
  float *work, *work_weights;  // what a threshold search uses up
  int32_t* ids;                // of tokens that may be drawn
  double* blocks;              // weight of each block of tokens

  SampleScratch(std::byte* memory, int64_t width) {
    blocks = reinterpret_cast<double*>(memory);
    float* next = reinterpret_cast<float*>(memory + block_bytes(width));
    for (float** part : {&scaled, &weights, &kept, &kept_weights, &work, &work_weights}) {
      *part = next;
      next += room(width);
    }
    ids = reinterpret_cast<int32_t*>(next);
  }
  static int64_t room(int64_t width) { return whole_vectors(width) + kLanes; }
  static size_t block_bytes(int64_t width) {
    return static_cast<size_t>((width / kBlock + 8) / 8 * 8) * sizeof(double);
  }
  static size_t bytes(int64_t width) {
    return block_bytes(width) + 7 * static_cast<size_t>(room(width)) * 4;
  }
};

struct Parameters {
  float temperature;
  int64_t top_k;
  float top_p;
  double uniform;
};

// Tokens that may be drawn; in order, so that without ids they are all.
struct Choice {
  Weighted set;
  const int32_t* ids;
};

struct Drawn {
  int64_t token;
  float threshold;  // the least scaled logit that could be drawn
};

// e^x for x <= 0 to about 2 units in the last place: 2^(x log2 e), reduced to the nearest whole
// power and a polynomial of degree 6 (its largest relative error is the least there can be).
RBLN_INLINE Vec weight_of(Vec x) {
  const Vec clamped = vmax(x, splat(-105.0f));  // underflows to 0
  const Vec n = round_whole(clamped * 1.44269504088896341f);
  const Vec r = clamped * 1.44269504088896341f - n;
  Vec y = splat(1.5345810515565634e-4f);
  y = y * r + 1.3399930903688073e-3f;
  y = y * r + 9.618489071726799e-3f;
  y = y * r + 5.550328642129898e-2f;
  y = y * r + 2.4022646248340607e-1f;
  y = y * r + 6.931471824645996e-1f;
  y = y * r + 1.0f;
  return scale_by_power(y, n);
}

// Draws one of `count` logits.
class RowSampler {
 public:
  RowSampler(SampleScratch scratch, int64_t count) : s_(scratch), count_(count) {}

  template <class T>
  Drawn draw(const T* logits, const Parameters& by) {
    scale(logits, std::min(by.temperature, FLT_MAX));
    if (has_nan_) return {first_nan(), -kInfinity};
    if (most_ == -kInfinity) return {0, most_};
    const bool infinite = most_ == kInfinity;
    if (infinite) only_infinite();
    const bool cuts = by.top_k > 0 && by.top_k < count_;
    const bool cuts_weight = by.top_p < 1.0f;
    if (!cuts && !cuts_weight) {
      const auto weights = [this](int64_t i) { return weight_of(load(s_.scaled + i) - most_); };
      return {pick(count_, weights, by.uniform, s_.blocks), -kInfinity};
    }
    const float share = std::max(by.top_p, 0.0f);
    const Choice choice = cuts ? best(by.top_k) : heavy(share);
    const Weighted& set = choice.set;
    float least = cuts ? least_ : -kInfinity;
    if (cuts_weight)
      least = std::max(least, choice.ids ? lightest(set, share) : lightest_of_all(set, share));
    const auto weights = [&](int64_t i) {
      return select(load(set.values + i) >= least, load(set.weights + i), Vec{});
    };
    const int64_t at = pick(set.count, weights, by.uniform, s_.blocks);
    return {choice.ids ? choice.ids[at] : at, infinite ? kInfinity : least};
  }

 private:
  // Logits by temperature, and the largest of them.
  template <class T>
  void scale(const T* logits, float temperature) {
    Vec most = splat(-kInfinity);
    UVec size{};  // without the sign; as an integer, which is larger for a NaN than for infinity
    for_vectors(count_, [&](int64_t i, auto lanes) {
      const Vec v = load_some(logits + i, lanes) / temperature;
      store(s_.scaled + i, v);
      const UVec bits = bit_cast<UVec>(v) << 1;
      size = bits > size ? bits : size;
      if constexpr (std::is_same_v<decltype(lanes), AllLanes>) most = vmax(v, most);
    });
    std::fill_n(s_.scaled + count_, kLanes, -kInfinity);
    has_nan_ = any_of(bit_cast<IVec>(size > (0x7f800000u << 1)));
    const float* rest = s_.scaled + count_ / kLanes * kLanes;
    most_ = max_of(vmax(load(rest), most));
  }

  int64_t first_nan() const {
    int64_t at = 0;
    while (s_.scaled[at] == s_.scaled[at]) ++at;
    return at;
  }

  // Where logits are infinite, those alone can be drawn.
  void only_infinite() {
    for (int64_t i = 0; i < count_; ++i) s_.scaled[i] = s_.scaled[i] == kInfinity ? 0 : -kInfinity;
    most_ = 0;
  }

  // ---- top-k

  // The values that are at least the k-th largest, with their weights.
  Choice best(int64_t k) {
    Weighted kept = at_least(bound_of(k));
    least_ = threshold<false>(kept, {s_.work, s_.work_weights}, static_cast<double>(k));
    kept = again(kept, least_);
    total_ = weigh(kept);
    return {kept, s_.ids};
  }

  // A value that at least k values reach: the k-th largest of the largest of many groups.
  float bound_of(int64_t k) {
    const int64_t vectors = count_ / kLanes;
    const int64_t size = std::max<int64_t>(1, vectors * kLanes / (4 * k));  // vectors in a group
    const int64_t groups = vectors / size * kLanes;
    if (size < 2 || groups < k) return -FLT_MAX;
    for (int64_t group = 0; group < groups; group += kLanes) {
      const float* from = s_.scaled + group * size;
      Vec most = load(from);
      for (int64_t i = 1; i < size; ++i) most = vmax(load(from + i * kLanes), most);
      store(s_.work + group, vmax(most, splat(-FLT_MAX)));
    }
    const Weighted set{s_.work, s_.work_weights, groups};
    set.fill_up();
    return threshold<false>(set, set, static_cast<double>(k));
  }

  // Of values and ids those that are `bound` or more.
  Weighted again(Weighted kept, float bound) const {
    int64_t count = 0;
    for (int64_t i = 0; i < kept.count; i += kLanes) {
      const Vec v = load(kept.values + i);
      const uint32_t hits = bits_of(v >= bound);
      IVec ids;
      std::memcpy(&ids, s_.ids + i, sizeof(ids));
      compress(s_.ids + count, ids, hits);
      count += compress(kept.values + count, v, hits);
    }
    kept.count = count;
    kept.fill_up();
    return kept;
  }

  // ---- top-p

  // The tokens of which the heaviest weigh p of all. Mostly those are few: what weighs less than
  // 1/512 of 1 - p of the heaviest is left out, if there is enough without. If not, all tokens.
  Choice heavy(float p) {
    const float light = bound_by_weight((1.0 - p) / 512);
    Weighted kept{s_.kept, s_.kept_weights};
    total_ = 0;
    for_blocks(count_, [&](int64_t, int64_t first, int64_t end) {
      LaneSums sums;
      Vec largest = splat(-kInfinity);
      for (int64_t i = first; i < end; i += kLanes) {
        const Vec v = load(s_.scaled + i), w = weight_of(v - most_);
        store(s_.weights + i, w);
        sums.add(w);
        largest = vmax(v, largest);
      }
      total_ += sums.total();
      if (kept.count <= count_ / 8 && any_of(largest >= light)) append(kept, first, end, light);
    });
    kept.fill_up();
    if (kept.count <= count_ / 8 && weigh(kept) >= p * total_) return {kept, s_.ids};
    return {{s_.scaled, s_.weights, count_}, nullptr};
  }

  // A finite value that all tokens reach that weigh `weight` or more.
  float bound_by_weight(double weight) const {
    const double value = static_cast<double>(most_) + std::log(weight);
    return std::max(std::nextafter(static_cast<float>(value), -kInfinity), -FLT_MAX);
  }

  // The largest value such that it and all larger ones weigh p of the total.
  float lightest(const Weighted& kept, float p) const {
    return threshold<true>(kept, {s_.work, s_.work_weights}, p * total_);
  }

  // The same of all tokens, where the heaviest are not enough. Their search begins with the few
  // values between which the threshold is likely to lie; it goes through all if it does not.
  float lightest_of_all(const Weighted& all, float p) const {
    const Range range = likely(all, p);
    Weighted between{s_.kept, s_.kept_weights};
    const double target = p * total_, above = split_off(all, range, between);
    const double reached = above + weight(between);
    if (!(above < target && target <= reached)) return lightest(all, p);
    return threshold<true>(between, {s_.work, s_.work_weights}, target - above);
  }

  // Values between which the threshold is likely to lie, from a part of all: below it are 1 - p of
  // the weight, which is that of many tokens.
  Range likely(const Weighted& all, float p) const {
    constexpr int64_t kStep = 32 * kLanes;
    Weighted part{s_.kept, s_.kept_weights};
    for (int64_t i = 0; i + kLanes <= all.count; i += kStep) {
      store(part.values + part.count, load(all.values + i));
      store(part.weights + part.count, load(all.weights + i));
      part.count += kLanes;
    }
    part.fill_up();
    const double whole = weight(part);
    const double below =
        (1.0 - p) * total_ * static_cast<double>(part.count) / static_cast<double>(all.count);
    const Weighted work{s_.work, s_.work_weights};
    return {threshold<true>(part, work, whole - 0.7 * below),
            threshold<true>(part, work, whole - 1.4 * below)};
  }

  // Copies the values of the range, without its most; returns what those weigh that reach that.
  static double split_off(const Weighted& all, const Range& range, Weighted& between) {
    LaneSums above;
    int64_t count = 0;
    for (int64_t i = 0; i < all.count; i += kLanes) {
      const Vec v = load(all.values + i), w = load(all.weights + i);
      above.add(select(v >= range.most, w, Vec{}));
      const uint32_t hits = bits_of((v >= range.least) & (v < range.most));
      compress(between.weights + count, w, hits);
      count += compress(between.values + count, v, hits);
    }
    between.count = count;
    between.fill_up();
    return above.total();
  }

  static double weight(const Weighted& set) {
    LaneSums sums;
    for (int64_t i = 0; i < set.count; i += kLanes) sums.add(load(set.weights + i));
    return sums.total();
  }

  // ---- both

  // Values and ids of the tokens that reach `bound`.
  Weighted at_least(float bound) const {
    Weighted kept{s_.kept, s_.kept_weights};
    for_blocks(count_, [&](int64_t, int64_t first, int64_t end) {
      Vec largest = splat(-kInfinity);
      for (int64_t i = first; i < end; i += kLanes) largest = vmax(load(s_.scaled + i), largest);
      if (any_of(largest >= bound)) append(kept, first, end, bound);
    });
    kept.fill_up();
    return kept;
  }

  void append(Weighted& kept, int64_t first, int64_t end, float bound) const {
    const IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t count = kept.count;
    for (int64_t i = first; i < end; i += kLanes) {
      const Vec v = load(s_.scaled + i);
      const uint32_t hits = bits_of(v >= bound);
      compress(s_.ids + count, lanes + static_cast<int32_t>(i), hits);
      count += compress(kept.values + count, v, hits);
    }
    kept.count = count;
  }

  // Sets the weights of the values, e^(value - largest); returns their sum.
  double weigh(const Weighted& set) const {
    LaneSums sums;
    for (int64_t i = 0; i < set.count; i += kLanes) {
      const Vec w = weight_of(load(set.values + i) - most_);
      store(set.weights + i, w);
      sums.add(w);
    }
    return sums.total();
  }

  SampleScratch s_;
  int64_t count_;
  bool has_nan_ = false;
  float most_ = 0, least_ = 0;
  double total_ = 0;
};

}  // namespace RBLN_ISA
}  // namespace rbln
