// SPDX-License-Identifier: Apache-2.0
// The matrix micro-kernel: a tile of MR rows by NR groups of 16 columns, accumulated over all of K.
//
// Each element is one chain of multiply-adds in the order of k, whatever MR and NR are. So a row's
// result depends neither on how many rows are computed with it nor on which thread computes it.
//
// Weights are packed in groups of 16 columns: bf16 as [K/2][16][2] (pairs of k interleaved, the
// operand layout of vdpbf16ps), fp16 and fp32 as [K][16].
#pragma once

#include "../vec.h"

namespace rbln {
namespace RBLN_ISA {

#if defined(__AVX512BF16__)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

#if defined(__AVX512F__)
constexpr int kWideRows = 12;  // rows of a tile two groups wide: 24 of 32 registers accumulate
constexpr int kSlimRows = 6;   // rows of a tile four groups wide
constexpr int kSlimGroups = 4;
#elif defined(__AVX2__)
constexpr int kWideRows = 3;
constexpr int kSlimRows = 1;
constexpr int kSlimGroups = 4;
#else
constexpr int kWideRows = 2;
constexpr int kSlimRows = 1;
constexpr int kSlimGroups = 2;
#endif

// What rows are multiplied as: pairs of bf16 where the hardware takes them, floats elsewhere.
template <class T>
struct RowOf {
  using Type = float;
};
#if defined(__AVX512BF16__)
template <>
struct RowOf<BFloat16> {
  using Type = BFloat16;
};
#endif
template <class T>
using Row = typename RowOf<T>::Type;

// Elements between two k (fp) or two pairs of k (bf16) of a group.
template <class T>
constexpr int64_t group_elements(int64_t k) {
  return std::is_same_v<T, BFloat16> ? (k + 1) / 2 * 32 : k * 16;
}

template <int NR>
struct Groups {
  const void* start[NR];
};

#if defined(__AVX512BF16__)
RBLN_INLINE Vec dot_pairs(Vec acc, UVec a, UVec b) {
  return bit_cast<Vec>(
      _mm512_dpbf16_ps(bit_cast<__m512>(acc), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
}

template <int MR, int NR>
RBLN_INLINE void accumulate(const BFloat16* x, int64_t ldx, const Groups<NR>& groups, int64_t k,
                            Vec (&acc)[MR][NR], const char* ahead) {
  // Memory answers later than the hardware's prefetcher asks: 200 to 300 ns at the rate at which a
  // tile reads each of its groups. Into the second-level cache; the first gains nothing.
  constexpr int64_t kAhead = NR >= 4 ? 1280 : 4096;
  const auto step = [&](int64_t pair, auto row_pair) {
    UVec b[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) {
      const char* at = static_cast<const char*>(groups.start[n]) + pair * 64;
      std::memcpy(&b[n], at, 64);
      __builtin_prefetch(at + kAhead, 0, 2);
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      const UVec a = bit_cast<UVec>(_mm512_set1_epi32(static_cast<int>(row_pair(m))));
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) acc[m][n] = dot_pairs(acc[m][n], a, b[n]);
    }
  };
  const int64_t pairs = k / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (ahead) __builtin_prefetch(ahead + pair * 64);
    step(pair, [&](int m) {
      uint32_t two;
      std::memcpy(&two, x + m * ldx + 2 * pair, sizeof(two));
      return two;
    });
  }
  if (k % 2) step(pairs, [&](int m) { return uint32_t{x[m * ldx + k - 1].bits}; });
}
#endif

template <int MR, int NR, class Load>
RBLN_INLINE void fma_step(const float* x, int64_t ldx, Vec (&acc)[MR][NR], Load weight) {
  Vec b[NR];
#pragma GCC unroll 4
  for (int n = 0; n < NR; ++n) b[n] = weight(n);
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
    const Vec a = splat(x[m * ldx]);
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) acc[m][n] += a * b[n];
  }
}

template <class T, int MR, int NR>
RBLN_INLINE void accumulate(const float* x, int64_t ldx, const Groups<NR>& groups, int64_t k,
                            Vec (&acc)[MR][NR]) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto pair_of = [&](int n, int64_t pair) {
      UVec both;
      std::memcpy(&both, static_cast<const uint32_t*>(groups.start[n]) + pair * 16, 64);
      return both;
    };
    for (int64_t i = 0; i < k; i += 2) {
      fma_step(x + i, ldx, acc, [&](int n) { return bit_cast<Vec>(pair_of(n, i / 2) << 16); });
      if (i + 1 == k) break;
      fma_step(x + i + 1, ldx, acc,
               [&](int n) { return bit_cast<Vec>(pair_of(n, i / 2) & 0xffff0000u); });
    }
  } else {
    for (int64_t i = 0; i < k; ++i) {
      fma_step(x + i, ldx, acc,
               [&](int n) { return load(static_cast<const T*>(groups.start[n]) + i * 16); });
    }
  }
}

// c[m][n * 16 + lane] = (add ? c : 0) + x[m] . column (n, lane); ldc floats between rows of c.
// `ahead` is a group of columns that is needed soon, or null.
template <class T, int MR, int NR>
void tile(const Row<T>* x, int64_t ldx, const Groups<NR>& groups, int64_t k, float* c, int64_t ldc,
          bool add, const char* ahead) {
  Vec acc[MR][NR];
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) acc[m][n] = add ? load(c + m * ldc + n * kLanes) : Vec{};
  }
  if constexpr (std::is_same_v<Row<T>, float>) {
    accumulate<T, MR, NR>(x, ldx, groups, k, acc);
  } else {
    accumulate<MR, NR>(x, ldx, groups, k, acc, ahead);
  }
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) store(c + m * ldc + n * kLanes, acc[m][n]);
  }
}

// The same for a number of rows known at run time, at most MR.
template <class T, int NR, int MR>
RBLN_INLINE void tile_rows(int rows, const Row<T>* x, int64_t ldx, const Groups<NR>& groups,
                           int64_t k, float* c, int64_t ldc, bool add,
                           const char* ahead = nullptr) {
  if constexpr (MR > 1) {
    if (rows < MR) return tile_rows<T, NR, MR - 1>(rows, x, ldx, groups, k, c, ldc, add, ahead);
  }
  tile<T, MR, NR>(x, ldx, groups, k, c, ldc, add, ahead);
}

// Rows of `x` as the micro-kernel wants them: themselves, or converted to floats in `buffer`.
template <class T>
RBLN_INLINE const Row<T>* as_rows(const T* x, int64_t ldx, int rows, int64_t k, float* buffer,
                                  int64_t* row_stride) {
  if constexpr (std::is_same_v<Row<T>, T>) {
    *row_stride = ldx;
    return x;
  } else {
    for (int m = 0; m < rows; ++m) {
      int64_t i = 0;
      for (; i + kLanes <= k; i += kLanes) store(buffer + m * k + i, load(x + m * ldx + i));
      for (; i < k; ++i) buffer[m * k + i] = to_float(x[m * ldx + i]);
    }
    *row_stride = k;
    return buffer;
  }
}

}  // namespace RBLN_ISA
}  // namespace rbln
