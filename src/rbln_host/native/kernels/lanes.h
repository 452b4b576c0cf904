// SPDX-License-Identifier: Apache-2.0
// Some lanes of a vector: as bits, one after another in memory, and sums of all in fp64.
#pragma once

#include "../vec.h"

namespace rbln {
namespace RBLN_ISA {

constexpr IVec kLaneIds = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Calls `function(bit)` for each set bit, from the lowest on.
template <class F>
RBLN_INLINE void for_bits(uint32_t word, F function) {
  for (; word; word &= word - 1) function(__builtin_ctz(word));
}

// A bit for each lane that is chosen, that is -1 and not 0.
RBLN_INLINE uint32_t bits_of(IVec chosen) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask(bit_cast<__m512i>(chosen));
#elif defined(__AVX2__)
  __m256 halves[2];
  std::memcpy(halves, &chosen, sizeof(halves));
  const int low = _mm256_movemask_ps(halves[0]), high = _mm256_movemask_ps(halves[1]);
  return static_cast<uint32_t>(low | high << 8);
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= (chosen[lane] & 1u) << lane;
  return bits;
#endif
}

RBLN_INLINE bool any_of(IVec chosen) { return bits_of(chosen) != 0; }

// Writes the lanes whose bits are set one after another, and up to 16 elements in all; returns how
// many lanes.
template <class V, class E>
RBLN_INLINE int64_t compress(E* out, V v, uint32_t bits) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>(bits);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(mask, bit_cast<__m512i>(v)));
#else
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    out[count] = v[lane];
    count += bits >> lane & 1;
  }
#endif
  return __builtin_popcount(bits);
}

// ---- sums in fp64

typedef double DVec __attribute__((vector_size(64)));

// The first 8 lanes, or the others, in fp64.
template <bool kHigh>
RBLN_INLINE DVec half_of(Vec v) {
#if defined(__AVX512DQ__)
  const __m512 all = bit_cast<__m512>(v);
  const __m256 half = kHigh ? _mm512_extractf32x8_ps(all, 1) : _mm512_castps512_ps256(all);
  return bit_cast<DVec>(_mm512_cvtps_pd(half));
#else
  typedef float Half __attribute__((vector_size(32)));
  Half halves[2];
  std::memcpy(halves, &v, sizeof(halves));
  return __builtin_convertvector(halves[kHigh], DVec);
#endif
}

// A sum of each lane.
struct LaneSums {
  DVec low{}, high{};

  RBLN_INLINE void add(Vec v) {
    low += half_of<false>(v);
    high += half_of<true>(v);
  }
  // Of all lanes, in the same order everywhere.
  RBLN_INLINE double total() const {
    const DVec s = low + high;
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
};

}  // namespace RBLN_ISA
}  // namespace rbln
