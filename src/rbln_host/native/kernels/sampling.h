// SPDX-License-Identifier: Apache-2.0
// The next token of each row: a bitmask of allowed tokens, temperature, top-k, top-p, a draw.
//
// One task is one row, so a token depends on its row alone. Nothing is sorted: a threshold is found
// by splitting the values' range into parts and going on with the part that it lies in.
#pragma once

#include <algorithm>
#include <cfloat>
#include <limits>

#include "rows.h"

namespace rbln {
namespace RBLN_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- mask_tokens: bitmask, logits (in place)

inline int64_t mask_tokens_plan(const Call& call, Shared& shared, int) {
  return in_use(call, shared, call[1].shape[0]);
}

// Calls `function(bit)` for each set bit.
template <class F>
RBLN_INLINE void for_bits(uint32_t word, F function) {
  for (; word; word &= word - 1) function(__builtin_ctz(word));
}

// As many values as a word of a bitmask has bits.
template <class T>
struct Word {
  T values[32];
};

// Sets the values whose bit is not set to `never`; of 32 values the fewer are gone through.
template <class T>
RBLN_INLINE void mask_word(T* values, uint32_t word, const Word<T>& never) {
  if (__builtin_popcount(word) >= 16) {
    for_bits(~word, [&](int bit) { values[bit] = never.values[bit]; });
    return;
  }
  Word<T> kept = never;
  for_bits(word, [&](int bit) { kept.values[bit] = values[bit]; });
  std::memcpy(values, &kept, sizeof(kept));
}

// Bit i % 32 of word i / 32 says whether token i is allowed; the logits of others become -infinity.
template <class T>
void mask_tokens_row(const Call& call, int64_t row) {
  const Operand &mask = call[0], &logits = call[1];
  const int32_t* words = mask.as<int32_t>() + mask.row_offset(row);
  T* values = logits.as<T>() + logits.row_offset(row);
  const int64_t width = logits.last();
  Word<T> never;
  std::fill_n(never.values, 32, from_float<T>(-kInfinity));
  int64_t start = 0;
  for (; start + 32 <= width; start += 32) {
    const uint32_t word = static_cast<uint32_t>(words[start / 32]);
    if (word != 0xffffffffu) mask_word(values + start, word, never);
  }
  for (int64_t i = start; i < width; ++i) {
    if (!(words[i / 32] >> i % 32 & 1)) values[i] = never.values[0];
  }
}

inline void mask_tokens_run(const Call& call, Shared&, int64_t task, std::byte*) {
  with_float_type(call[1].dtype, [&](auto* type) {
    mask_tokens_row<std::remove_pointer_t<decltype(type)>>(call, task);
  });
}

// ---- random numbers

// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
// The first two words of block `position` of the stream `seed`, as a number in [0, 1) of 53 bits.
inline double philox_uniform(uint64_t seed, uint64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<double>((uint64_t{c1} << 32 | c0) >> 11) * 0x1p-53;
}

// ---- sets of values: arrays whose last vector is filled up with -infinity and weight 0

typedef double DVec __attribute__((vector_size(128)));

RBLN_INLINE int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

RBLN_INLINE double sum(DVec v) {
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += v[lane];
  return total;
}

// Writes the chosen lanes one after another, and up to 16 elements in all; returns how many lanes.
template <class V, class E>
RBLN_INLINE int64_t compress(E* out, V v, IVec chosen) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_movepi32_mask(bit_cast<__m512i>(chosen));
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(mask, bit_cast<__m512i>(v)));
  return __builtin_popcount(mask);
#else
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    out[count] = v[lane];
    count += chosen[lane] & 1;
  }
  return count;
#endif
}

RBLN_INLINE bool any_of(IVec chosen) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(bit_cast<__m512i>(chosen)) != 0;
#else
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= chosen[lane];
  return any != 0;
#endif
}

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
  static constexpr int kParts = 256;

  // Two parts around the middle: by turns halfway in size, and halfway in the number of floats
  // between, so that no set takes more than about 64 rounds.
  static Split in_two(Range range, int round) {
    const float mean = 0.5f * range.least + 0.5f * range.most;
    const int64_t order = (order_of(range.least) + order_of(range.most) + 1) >> 1;
    const float middle = round % 2 ? of_order(order) : mean;
    return {middle > range.least ? middle : range.most, 0};
  }

  // Many equal parts; in two where the range is too large or too small for that.
  static Split in_many(Range range, int round) {
    const float scale = kParts / (range.most - range.least);
    if (!(scale > 0 && scale < kInfinity)) return in_two(range, round);
    return {range.least, scale};
  }

  int parts() const { return scale_ == 0 ? 2 : kParts; }

  RBLN_INLINE IVec part_of(Vec v) const {
    if (scale_ == 0) return (v >= from_) & 1;
    const Vec part = (v - from_) * scale_;
    return __builtin_convertvector(vmin(vmax(part, Vec{}), splat(kParts - 1)), IVec);
  }

 private:
  Split(float from, float scale) : from_(from), scale_(scale) {}

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

// The measure of each part.
template <bool kByWeight>
void measure(const Weighted& set, const Split& split, double* parts) {
  constexpr int kCopies = 4;  // so that one addition need not wait for the one before
  double copies[kCopies][Split::kParts] = {};
  for (int64_t i = 0; i < set.count; i += kLanes) {
    const IVec part = split.part_of(load(set.values + i));
    const Vec measures = measure_of<kByWeight>(set, i);
    for (int lane = 0; lane < kLanes; ++lane) copies[lane % kCopies][part[lane]] += measures[lane];
  }
  for (int part = 0; part < Split::kParts; ++part) {
    parts[part] = 0;
    for (const auto& copy : copies) parts[part] += copy[part];
  }
}

// Keeps one part, in order; returns its range.
template <bool kByWeight>
Range keep(Weighted& set, const Split& split, int part) {
  int64_t kept = 0;
  Vec least = splat(kInfinity), most = splat(-kInfinity);
  for (int64_t i = 0; i < set.count; i += kLanes) {
    const Vec v = load(set.values + i);
    const IVec hit = (split.part_of(v) == part) & (v > -kInfinity);
    if (!any_of(hit)) continue;
    if constexpr (kByWeight) compress(set.weights + kept, load(set.weights + i), hit);
    kept += compress(set.values + kept, v, hit);
    least = vmin(select(hit, v, splat(kInfinity)), least);
    most = vmax(select(hit, v, splat(-kInfinity)), most);
  }
  set.count = kept;
  set.fill_up();
  return {min_of(least), max_of(most)};
}

// The largest of the values such that all that are at least as large count, or weigh, `target` or
// more; the least of them when all together do not. Uses up the set, whose values are finite.
template <bool kByWeight>
float threshold(Weighted set, double target) {
  double above = 0;
  double parts[Split::kParts];
  Range range = range_of(set);
  for (int round = 0; range.least < range.most; ++round) {
    const bool many = set.count > kLanes;
    const Split split = many ? Split::in_many(range, round) : Split::in_two(range, round);
    measure<kByWeight>(set, split, parts);
    int part = split.parts() - 1;
    while (part > 0 && above + parts[part] < target) above += parts[part--];
    range = keep<kByWeight>(set, split, part);
  }
  return range.least;
}

// ---- sample: logits, temperature, top_k, top_p, seed, position, token, threshold

constexpr float kGreedyBelow = 1e-5f;  // temperatures; as in vLLM
constexpr int64_t kBlock = 16 * kLanes;

// Memory for one row.
struct SampleScratch {
  float *scaled, *weights;     // of all tokens
  float *kept, *kept_weights;  // of tokens that may be drawn
  float *work, *work_weights;  // what a threshold search uses up
  int32_t* ids;                // of tokens that may be drawn
  double* blocks;              // weight of each block of tokens

  SampleScratch(std::byte* memory, int64_t width) {
    const int64_t room = whole_vectors(width) + kLanes;
    blocks = reinterpret_cast<double*>(memory);
    float* next = reinterpret_cast<float*>(memory + block_bytes(width));
    for (float** part : {&scaled, &weights, &kept, &kept_weights, &work, &work_weights}) {
      *part = next;
      next += room;
    }
    ids = reinterpret_cast<int32_t*>(next);
  }
  static size_t block_bytes(int64_t width) {
    return static_cast<size_t>((width / kBlock + 8) / 8 * 8) * sizeof(double);
  }
  static size_t bytes(int64_t width) {
    return block_bytes(width) + 7 * static_cast<size_t>(whole_vectors(width) + kLanes) * 4;
  }
};

inline size_t sample_scratch(const Call& call) { return SampleScratch::bytes(call[0].last()); }

struct Drawn {
  int64_t token;
  float threshold;  // the least scaled logit that could be drawn
};

class RowSampler {
 public:
  RowSampler(SampleScratch scratch, int64_t width) : s_(scratch), width_(width) {}

  template <class T>
  Drawn draw(const T* logits, float temperature, int64_t top_k, float top_p, double uniform) {
    scale(logits, std::min(temperature, FLT_MAX));
    if (has_nan_) return {first_nan(), -kInfinity};
    if (most_ == -kInfinity) return {0, most_};
    const bool infinite = most_ == kInfinity;
    if (infinite) only_infinite();
    const bool cuts = top_k > 0 && top_k < width_;
    const bool cuts_weight = top_p < 1.0f;
    if (!cuts && !cuts_weight) {
      weigh(Weighted{s_.scaled, s_.weights, width_});
      return {pick({s_.scaled, s_.weights, width_}, -kInfinity, uniform), -kInfinity};
    }
    Weighted kept = cuts ? best(top_k) : heavy(top_p);
    float least = cuts ? least_ : -kInfinity;
    if (cuts_weight) least = std::max(least, lightest(kept, std::max(top_p, 0.0f)));
    const int64_t at = pick(kept, least, uniform);
    return {s_.ids[at], infinite ? kInfinity : least};
  }

 private:
  // Logits by temperature, and the largest of them.
  template <class T>
  void scale(const T* logits, float temperature) {
    Vec most = splat(-kInfinity);
    IVec nan{};
    for_vectors(width_, [&](int64_t i, auto lanes) {
      const Vec v = load_some(logits + i, lanes) / temperature;
      store(s_.scaled + i, v);
      nan |= v != v;
      if constexpr (std::is_same_v<decltype(lanes), AllLanes>) most = vmax(v, most);
    });
    Weighted{s_.scaled, s_.weights, width_}.fill_up();
    has_nan_ = any_of(nan);
    const float* rest = s_.scaled + width_ / kLanes * kLanes;
    most_ = max_of(vmax(load(rest), most));
  }

  int64_t first_nan() const {
    int64_t at = 0;
    while (s_.scaled[at] == s_.scaled[at]) ++at;
    return at;
  }

  // Where logits are infinite, those alone can be drawn.
  void only_infinite() {
    for (int64_t i = 0; i < width_; ++i) s_.scaled[i] = s_.scaled[i] == kInfinity ? 0 : -kInfinity;
    most_ = 0;
  }

  // Sets the weights of the values, e^(value - largest), and their sum in each block.
  void weigh(const Weighted& set) {
    total_ = by_block(set, [&](int64_t i) {
      const Vec w = vexp(load(set.values + i) - most_);
      store(set.weights + i, w);
      return w;
    });
  }

  // Sums `weights(i)` of the vectors at i, block by block; returns the sum of all.
  template <class F>
  double by_block(const Weighted& set, F weights) {
    double total = 0;
    for (int64_t block = 0; block * kBlock < set.count; ++block) {
      DVec sums{};
      const int64_t end = std::min(set.count, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < end; i += kLanes) {
        sums += __builtin_convertvector(weights(i), DVec);
      }
      total += s_.blocks[block] = sum(sums);
    }
    return total;
  }

  // The values that are at least the k-th largest, with their weights.
  Weighted best(int64_t k) {
    Weighted kept = at_least(bound_of(k), s_.scaled);
    std::copy_n(kept.values, kept.count + kLanes, s_.work);
    least_ = threshold<false>({s_.work, s_.work_weights, kept.count}, static_cast<double>(k));
    kept = again(kept, least_);
    weigh(kept);
    return kept;
  }

  // A value that at least k values reach: the k-th largest of the largest of many groups.
  float bound_of(int64_t k) {
    const int64_t vectors = width_ / kLanes;
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
    return threshold<false>(set, static_cast<double>(k));
  }

  // All values but the lightest ones, which weigh less than 1 - p of all in total.
  Weighted heavy(float p) {
    weigh({s_.scaled, s_.weights, width_});
    // A little less than that, for the rounding.
    const double light = 0.99 * (1.0 - std::max(p, 0.0f)) * total_ / static_cast<double>(width_);
    return at_least(std::max(static_cast<float>(light), FLT_TRUE_MIN), s_.weights);
  }

  // Values, weights and ids of the tokens for which `by` is `bound` or more. The bound is such that
  // no token that cannot be drawn reaches it.
  Weighted at_least(float bound, const float* by) {
    Weighted kept{s_.kept, s_.kept_weights};
    const IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = 0; i < width_; i += kLanes) {
      const Vec v = load(s_.scaled + i);
      const IVec hit = load(by + i) >= bound;
      if (!any_of(hit)) continue;
      compress(s_.ids + kept.count, lanes + static_cast<int32_t>(i), hit);
      compress(kept.weights + kept.count, load(s_.weights + i), hit);
      kept.count += compress(kept.values + kept.count, v, hit);
    }
    kept.fill_up();
    return kept;
  }

  // Of values and ids those that are `bound` or more.
  Weighted again(Weighted kept, float bound) {
    int64_t count = 0;
    for (int64_t i = 0; i < kept.count; i += kLanes) {
      const Vec v = load(kept.values + i);
      const IVec hit = v >= bound;
      IVec ids;
      std::memcpy(&ids, s_.ids + i, sizeof(ids));
      compress(s_.ids + count, ids, hit);
      count += compress(kept.values + count, v, hit);
    }
    kept.count = count;
    kept.fill_up();
    return kept;
  }

  // The largest value such that it and all larger ones weigh p of the total.
  float lightest(const Weighted& kept, float p) {
    std::copy_n(kept.values, kept.count + kLanes, s_.work);
    std::copy_n(kept.weights, kept.count + kLanes, s_.work_weights);
    return threshold<true>({s_.work, s_.work_weights, kept.count}, p * total_);
  }

  // Which value is drawn, of those that are `least` or more: the first at which the running sum of
  // weights, in their order, exceeds `uniform` of the whole. The last that weighs anything if none.
  int64_t pick(const Weighted& set, float least, double uniform) {
    if (least > -kInfinity) {
      total_ = by_block(set, [&](int64_t i) {
        return select(load(set.values + i) >= least, load(set.weights + i), Vec{});
      });
    }
    double left = uniform * total_;
    int64_t block = 0, last = 0;
    const int64_t blocks = (set.count + kBlock - 1) / kBlock;
    while (block < blocks - 1 && s_.blocks[block] <= left) left -= s_.blocks[block++];
    for (; block >= 0; --block) {
      bool any = false;
      const int64_t end = std::min(set.count, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < end; ++i) {
        if (!(set.values[i] >= least) || set.weights[i] == 0) continue;
        if (left < set.weights[i]) return i;
        left -= set.weights[i];
        last = i;
        any = true;
      }
      if (any) break;
      left = kInfinity;  // by rounding nothing was found: the last token that weighs anything
    }
    return last;
  }

  SampleScratch s_;
  int64_t width_;
  bool has_nan_ = false;
  float most_ = 0, least_ = 0;
  double total_ = 0;
};

inline int64_t sample_plan(const Call& call, Shared& shared, int) {
  return in_use(call, shared, call[0].shape[0]);
}

// The largest logit of a row and the first token that has it.
template <class T>
Drawn greedy(const Operand& logits, int64_t row) {
  const T* values = logits.as<T>() + logits.row_offset(row);
  const int64_t at = first_largest(values, logits.last());
  return {at, to_float(values[at])};
}

template <class T>
void sample_row(const Call& call, int64_t row, std::byte* scratch) {
  const auto at = [&](int index) { return row * call[index].stride[0]; };
  const float temperature = call[1].as<float>()[at(1)];
  const int64_t position = call[5].as<int64_t>()[at(5)];
  Drawn drawn{0, 0};
  if (position >= 0 && temperature >= kGreedyBelow) {
    const uint64_t seed = call[4].as<uint64_t>()[at(4)];
    const int64_t width = call[0].last();
    RowSampler sampler(SampleScratch(scratch, width), width);
    const T* logits = call[0].as<T>() + call[0].row_offset(row);
    drawn = sampler.draw(logits, temperature, load_index(call[2], row), call[3].as<float>()[at(3)],
                         philox_uniform(seed, static_cast<uint64_t>(position)));
  } else if (position >= 0) {
    drawn = greedy<T>(call[0], row);
  }
  call[6].as<int64_t>()[at(6)] = drawn.token;
  call[7].as<float>()[at(7)] = drawn.threshold;
}

inline void sample_run(const Call& call, Shared&, int64_t task, std::byte* scratch) {
  with_float_type(call[0].dtype, [&](auto* type) {
    sample_row<std::remove_pointer_t<decltype(type)>>(call, task, scratch);
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
