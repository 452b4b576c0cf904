// SPDX-License-Identifier: Apache-2.0
// Weighted sums of values for few queries: o[g] += sum over keys of p[g][key] * value[key].
#pragma once

#include "attention.h"

namespace rbln {
namespace RBLN_ISA {

// Calls `add<GB>(first head)` for all heads of a group, GB of them at a time.
template <class F>
RBLN_INLINE void for_heads(int64_t group, F add) {
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) add(std::integral_constant<int, 4>{}, g);
  if (group - g == 3) add(std::integral_constant<int, 3>{}, g);
  if (group - g == 2) add(std::integral_constant<int, 2>{}, g);
  if (group - g == 1) add(std::integral_constant<int, 1>{}, g);
}

// GB heads and ND vectors of d.
template <class T, int GB, int ND>
RBLN_INLINE void add_values(const float* p, int64_t ldp, const T* values, int64_t stride,
                            int64_t count, float* o, int64_t ldo) {
  Vec acc[GB][ND];
#pragma GCC unroll 4
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int d = 0; d < ND; ++d) acc[g][d] = load(o + g * ldo + d * kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec v[ND];
#pragma GCC unroll 4
    for (int d = 0; d < ND; ++d) v[d] = load(values + j * stride + d * kLanes);
#pragma GCC unroll 4
    for (int g = 0; g < GB; ++g) {
      const Vec weight = splat(p[g * ldp + j]);
#pragma GCC unroll 4
      for (int d = 0; d < ND; ++d) acc[g][d] += weight * v[d];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int d = 0; d < ND; ++d) store(o + g * ldo + d * kLanes, acc[g][d]);
  }
}

template <class T, int GB>
RBLN_INLINE void add_values_wide(const float* p, int64_t ldp, const T* values, int64_t stride,
                                 int64_t count, float* o, int64_t size) {
  int64_t d = 0;
  for (; d + 64 <= size; d += 64) {
    add_values<T, GB, 4>(p, ldp, values + d, stride, count, o + d, size);
  }
  for (; d < size; d += 16) add_values<T, GB, 1>(p, ldp, values + d, stride, count, o + d, size);
}

template <class T>
RBLN_INLINE void add_values_all(const float* p, int64_t ldp, const T* values, int64_t stride,
                                int64_t count, float* o, int64_t group, int64_t size) {
  for_heads(group, [&](auto heads, int64_t g) {
    add_values_wide<T, heads.value>(p + g * ldp, ldp, values, stride, count, o + g * size, size);
  });
}

// Whether values are added in pairs of keys, in which case a head's output is kept in the order in
// which the values of two rows interleave, until `straighten` puts it right.
template <class T>
RBLN_INLINE bool adds_pairs(int64_t size) {
  return kHasDot && std::is_same_v<T, BFloat16> && size % 32 == 0;
}

#if defined(__AVX512BF16__)
// Weights of keys 2i and 2i + 1 as bf16 in word i: half the work of single precision. The block
// path rounds its weights in the same way.
RBLN_INLINE void pack_weights(const float* p, uint32_t* pairs) {
  for (int64_t i = 0; i < kStepKeys; i += 32) {
    const auto both =
        _mm512_cvtne2ps_pbh(bit_cast<__m512>(load(p + i + 16)), bit_cast<__m512>(load(p + i)));
    std::memcpy(pairs + i / 2, &both, 64);
  }
}

// GB heads and NB times 32 of d.
template <int GB, int NB>
RBLN_INLINE void add_value_pairs(const uint32_t* pairs, int64_t ldp, const BFloat16* values,
                                 int64_t stride, int64_t count, float* o, int64_t ldo) {
  Vec acc[GB][2 * NB];
#pragma GCC unroll 4
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int d = 0; d < 2 * NB; ++d) acc[g][d] = load(o + g * ldo + d * kLanes);
  }
  for (int64_t j = 0; j < count; j += 2, values += 2 * stride) {
    Vec pair_weight[GB];
#pragma GCC unroll 4
    for (int g = 0; g < GB; ++g) {
      pair_weight[g] = bit_cast<Vec>(_mm512_set1_epi32(static_cast<int>(pairs[g * ldp + j / 2])));
    }
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b) {
      const __m512i even = _mm512_loadu_si512(values + b * 32);
      const __m512i odd =
          j + 1 < count ? _mm512_loadu_si512(values + stride + b * 32) : _mm512_setzero_si512();
      const UVec low = bit_cast<UVec>(_mm512_unpacklo_epi16(even, odd));
      const UVec high = bit_cast<UVec>(_mm512_unpackhi_epi16(even, odd));
#pragma GCC unroll 4
      for (int g = 0; g < GB; ++g) {
        const UVec w = bit_cast<UVec>(pair_weight[g]);
        acc[g][2 * b] = dot_pairs(acc[g][2 * b], w, low);
        acc[g][2 * b + 1] = dot_pairs(acc[g][2 * b + 1], w, high);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int d = 0; d < 2 * NB; ++d) store(o + g * ldo + d * kLanes, acc[g][d]);
  }
}

// Like add_values_all; `p` is overwritten.
RBLN_INLINE void add_pairs_all(float* p, int64_t ldp, const BFloat16* values, int64_t stride,
                               int64_t count, float* o, int64_t group, int64_t size) {
  for (int64_t g = 0; g < group; ++g) {
    uint32_t pairs[kStepKeys / 2];
    pack_weights(p + g * ldp, pairs);
    std::memcpy(p + g * ldp, pairs, sizeof(pairs));
  }
  for_heads(group, [&](auto heads, int64_t g) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(p + g * ldp);
    int64_t d = 0;
    for (; d + 64 <= size; d += 64) {
      add_value_pairs<heads.value, 2>(pairs, ldp, values + d, stride, count, o + g * size + d,
                                      size);
    }
    if (d < size) {
      add_value_pairs<heads.value, 1>(pairs, ldp, values + d, stride, count, o + g * size + d,
                                      size);
    }
  });
}
#endif

// Puts `size` outputs in order that were added in pairs.
RBLN_INLINE void straighten(float* o, int64_t size) {
  const IVec first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
  for (int64_t i = 0; i < size; i += 2 * kLanes) {
    const Vec low = load(o + i), high = load(o + i + kLanes);
    store(o + i, __builtin_shuffle(low, high, first));
    store(o + i + kLanes, __builtin_shuffle(low, high, first + 8));
  }
}

// What attend_part calls: adds the values of one step's keys.
template <class T>
RBLN_INLINE void add_step(float* p, const T* values, int64_t stride, int64_t count, float* o,
                          int64_t group, int64_t size) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (adds_pairs<T>(size)) {
      return add_pairs_all(p, kStepKeys, values, stride, count, o, group, size);
    }
  }
#endif
  add_values_all(p, kStepKeys, values, stride, count, o, group, size);
}

}  // namespace RBLN_ISA
}  // namespace rbln
