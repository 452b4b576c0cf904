// SPDX-License-Identifier: Apache-2.0
// Bitmasks of grammars: bit t % 32 of word t / 32 says whether token t is allowed.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace rbln {
namespace RBLN_ISA {

constexpr int64_t kWordBits = 32;

// The tokens that a row's words allow; all where there are no words.
class Allowed {
 public:
  Allowed(const int32_t* words, int64_t width) : words_(words), width_(width) {}

  bool all() const {
    if (words_ == nullptr) return true;
    int64_t i = 0;
    for (; i + kLanes <= whole_words(); i += kLanes) {
      if (any_of(load_words(i) != -1)) return false;
    }
    while (i < whole_words() && words_[i] == -1) ++i;
    return i == whole_words() && rest() == low_bits(width_ % kWordBits);
  }

  // Writes the logits of the allowed tokens one after another, and up to 16 more; returns how many
  // they are. Words without any are passed over 16 at a time.
  template <class T>
  int64_t gather(const T* logits, float* out) const {
    int64_t count = 0;
    for (int64_t i = 0; i < whole_words(); i += kLanes) {
      for_bits(bits_of(load_words(i) != 0), [&](int lane) {
        const uint32_t word = static_cast<uint32_t>(words_[i + lane]);
        const T* values = logits + (i + lane) * kWordBits;
        count += compress(out + count, load(values), word & 0xffff);
        count += compress(out + count, load(values + kLanes), word >> 16);
      });
    }
    const T* values = logits + whole_words() * kWordBits;
    for_bits(rest(), [&](int bit) { out[count++] = to_float(values[bit]); });
    return count;
  }

  // The allowed token that `before` allowed ones precede; there is one.
  int64_t token(int64_t before) const {
    int64_t i = 0;
    for (; i < whole_words(); ++i) {
      const int here = __builtin_popcount(static_cast<uint32_t>(words_[i]));
      if (before < here) break;
      before -= here;
    }
    uint32_t word = i < whole_words() ? static_cast<uint32_t>(words_[i]) : rest();
    for (; before > 0; --before) word &= word - 1;
    return i * kWordBits + __builtin_ctz(word);
  }

 private:
  static uint32_t low_bits(int64_t count) { return (uint32_t{1} << count) - 1; }

  int64_t whole_words() const { return width_ / kWordBits; }

  // The bits of the last word, if it is not whole.
  uint32_t rest() const {
    const uint32_t used = low_bits(width_ % kWordBits);
    return used ? static_cast<uint32_t>(words_[whole_words()]) & used : 0;
  }

  // 16 whole words from word i on, 0 where there are not so many.
  IVec load_words(int64_t i) const {
    IVec words{};
    const int64_t count = std::min<int64_t>(kLanes, whole_words() - i);
    std::memcpy(&words, words_ + i, static_cast<size_t>(count) * sizeof(int32_t));
    return words;
  }

  const int32_t* words_;
  int64_t width_;
};

// ---- mask_tokens: bitmask, logits (in place)

inline int64_t mask_tokens_plan(const Call& call, Shared& shared, int) {
  return in_use(call, shared, call[1].shape[0]);
}

// As many values as a word of a bitmask has bits.
template <class T>
struct Word {
  T values[kWordBits];
};

// Sets the values whose bit is not set to `never`; of 32 values the fewer are gone through.
template <class T>
RBLN_INLINE void mask_word(T* values, uint32_t word, const Word<T>& never) {
  if (__builtin_popcount(word) >= kWordBits / 2) {
    for_bits(~word, [&](int bit) { values[bit] = never.values[bit]; });
    return;
  }
  Word<T> kept = never;
  for_bits(word, [&](int bit) { kept.values[bit] = values[bit]; });
  std::memcpy(values, &kept, sizeof(kept));
}

// The logits of tokens that are not allowed become -infinity.
template <class T>
void mask_tokens_row(const Call& call, int64_t row) {
  const Operand &mask = call[0], &logits = call[1];
  const int32_t* words = mask.as<int32_t>() + mask.row_offset(row);
  T* values = logits.as<T>() + logits.row_offset(row);
  const int64_t width = logits.last();
  Word<T> never;
  std::fill_n(never.values, kWordBits, from_float<T>(-INFINITY));
  int64_t start = 0;
  for (; start + kWordBits <= width; start += kWordBits) {
    const uint32_t word = static_cast<uint32_t>(words[start / kWordBits]);
    if (word != 0xffffffffu) mask_word(values + start, word, never);
  }
  for (int64_t i = start; i < width; ++i) {
    if (!(words[i / kWordBits] >> i % kWordBits & 1)) values[i] = never.values[0];
  }
}

inline void mask_tokens_run(const Call& call, Shared&, int64_t task, std::byte*) {
  with_float_type(call[1].dtype, [&](auto* type) {
    mask_tokens_row<std::remove_pointer_t<decltype(type)>>(call, task);
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
