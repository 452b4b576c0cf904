// SPDX-License-Identifier: Apache-2.0
// Vectors of 16 lanes for the instruction set this file is compiled for.
//
// GCC's vector extension lowers them to what the target has: one zmm, two ymm or four xmm
// registers. Included only by kernels.cc, once per instruction set, inside that set's namespace.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define RBLN_INLINE inline __attribute__((always_inline))

namespace rbln {
namespace RBLN_ISA {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef uint32_t UVec __attribute__((vector_size(64)));
typedef uint16_t HVec __attribute__((vector_size(32)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
RBLN_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

RBLN_INLINE Vec splat(float value) { return value - Vec{}; }

RBLN_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

RBLN_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// ---- bfloat16

// 16 halves, each in the low bits of a lane.
RBLN_INLINE UVec load_halves(const void* p) {
#if defined(__AVX512F__)
  return bit_cast<UVec>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#else
  HVec half;
  std::memcpy(&half, p, sizeof(half));
  return __builtin_convertvector(half, UVec);
#endif
}

RBLN_INLINE Vec load(const BFloat16* p) { return bit_cast<Vec>(load_halves(p) << 16); }

RBLN_INLINE float to_float(BFloat16 value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

RBLN_INLINE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Rounds to nearest, ties to even; a NaN stays one. The hardware's instruction also turns denormals
// into zeros.
RBLN_INLINE void store(BFloat16* p, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh hardware = _mm512_cvtneps_pbh(bit_cast<__m512>(v));
  std::memcpy(p, &hardware, sizeof(hardware));
#else
  const UVec bits = bit_cast<UVec>(v);
  const UVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const UVec quiet = bits >> 16 | 0x40;
  const UVec nan = bit_cast<UVec>(v != v);
  const HVec half = __builtin_convertvector((rounded & ~nan) | (quiet & nan), HVec);
  std::memcpy(p, &half, sizeof(half));
#endif
}

// ---- float16

RBLN_INLINE float to_float(Float16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  return static_cast<float>(bit_cast<_Float16>(value.bits));
#endif
}

RBLN_INLINE Float16 to_float16(float value) {
#if defined(__F16C__)
  return {static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
  return {bit_cast<uint16_t>(static_cast<_Float16>(value))};
#endif
}

RBLN_INLINE Vec load(const Float16* p) {
#if defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

RBLN_INLINE void store(Float16* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = to_float16(v[i]);
#endif
}

// ---- one element

RBLN_INLINE float to_float(float value) { return value; }

template <class T>
RBLN_INLINE T from_float(float value);
template <>
RBLN_INLINE float from_float<float>(float value) {
  return value;
}
template <>
RBLN_INLINE BFloat16 from_float<BFloat16>(float value) {
  return to_bfloat16(value);
}
template <>
RBLN_INLINE Float16 from_float<Float16>(float value) {
  return to_float16(value);
}

// ---- part of a vector: the first `count` lanes, the others zero; nothing beyond is touched

template <class T>
RBLN_INLINE Vec load_some(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<size_t>(count) * sizeof(T));
  return load(buffer);
}

template <class T>
RBLN_INLINE void store_some(T* p, Vec v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, static_cast<size_t>(count) * sizeof(T));
}

// The number of lanes in use where it is known to be all of them.
struct AllLanes {};

template <class T>
RBLN_INLINE Vec load_some(const T* p, AllLanes) {
  return load(p);
}
template <class T>
RBLN_INLINE void store_some(T* p, Vec v, AllLanes) {
  store(p, v);
}

// Calls `function(i, lanes)` for each vector of a row of `width` elements; `lanes` is AllLanes for
// whole ones, a count for the rest.
template <class F>
RBLN_INLINE void for_vectors(int64_t width, F function) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) function(i, AllLanes{});
  if (i < width) function(i, width - i);
}

// ---- arithmetic

template <class M>
RBLN_INLINE Vec select(M mask, Vec yes, Vec no) {
  return mask ? yes : no;
}

RBLN_INLINE Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
RBLN_INLINE Vec vmin(Vec a, Vec b) { return a < b ? a : b; }

// Combines all lanes, always in the same order.
template <class F>
RBLN_INLINE float reduce(Vec v, F combine) {
  const IVec by8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
  const IVec by4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
  const IVec by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
  const IVec by1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
  v = combine(v, __builtin_shuffle(v, by8));
  v = combine(v, __builtin_shuffle(v, by4));
  v = combine(v, __builtin_shuffle(v, by2));
  return combine(v, __builtin_shuffle(v, by1))[0];
}

RBLN_INLINE float sum(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return a + b; });
}

RBLN_INLINE float max_of(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return vmax(a, b); });
}

RBLN_INLINE Vec vsqrt(Vec v) {
#if defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_sqrt_ps(bit_cast<__m512>(v)));
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

template <class F>
RBLN_INLINE Vec each(Vec v, F function) {
  for (int i = 0; i < kLanes; ++i) v[i] = function(v[i]);
  return v;
}

// 2^n * y for whole n; n may be far outside the range of exponents.
RBLN_INLINE Vec scale_by_power(Vec y, Vec n) {
#if defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_scalef_ps(bit_cast<__m512>(y), bit_cast<__m512>(n)));
#else
  // In two factors, so that neither overflows before the product does.
  const IVec whole = __builtin_convertvector(n, IVec);
  const IVec low = whole >> 1;
  const IVec high = whole - low;
  return y * bit_cast<Vec>((low + 127) << 23) * bit_cast<Vec>((high + 127) << 23);
#endif
}

RBLN_INLINE Vec round_whole(Vec x) {
#if defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_roundscale_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#else
  const Vec half = select(x < 0, splat(-0.5f), splat(0.5f));
  return __builtin_convertvector(__builtin_convertvector(x + half, IVec), Vec);
#endif
}

// e^x to about 2 units in the last place (Cephes' expf: reduction by ln 2 in two parts, then a
// polynomial of degree 5). Underflows to 0, overflows to infinity; NaN stays NaN.
RBLN_INLINE Vec vexp(Vec x) {
  // The order of operands lets a NaN through.
  const Vec clamped = vmin(splat(89.0f), vmax(splat(-105.0f), x));
  const Vec n = round_whole(select(x != x, splat(0.0f), clamped) * 1.44269504088896341f);
  const Vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return scale_by_power(y, n);
}

// e^x for x <= 0 to about 2 units in the last place: 2^(x log2 e), reduced to the nearest whole
// power and a polynomial of degree 6 (its largest relative error is the least there can be). Fewer
// steps than vexp. Underflows to 0.
RBLN_INLINE Vec vexp_fast(Vec x) {
  const Vec clamped = vmax(splat(-105.0f), x);
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

// 2^x for x <= 0 to 5e-6 of itself, for results that are rounded to bf16: reduction to the nearest
// whole number, then a polynomial of degree 4 (interpolated in Chebyshev nodes). NaN stays NaN.
RBLN_INLINE Vec vexp2_short(Vec x) {
  const Vec clamped = vmax(splat(-200.0f), x);
  const Vec n = round_whole(clamped);
  const Vec r = clamped - n;
  Vec y = splat(0.00966636852f);
  y = y * r + 0.0559219758f;
  y = y * r + 0.24022349f;
  y = y * r + 0.693121045f;
  y = y * r + 1.0f;
  return scale_by_power(y, n);
}

RBLN_INLINE Vec vsigmoid(Vec x) { return 1.0f / (1.0f + vexp(-x)); }

RBLN_INLINE Vec vtanh(Vec x) {
  // Near 0 the quotient cancels; there a polynomial (Cephes' tanhf) is exact enough.
  const Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec small = p * z * x + x;
  const Vec big = 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f);
  const Vec magnitude = vmax(x, -x);
  return select(x != x, x, select(magnitude < 0.625f, small, big));
}

// x times the normal distribution function. Its tail beyond |x| is a polynomial in t times
// e^(-x^2 / 2) (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; the error is at
// most 1e-7). NaN stays NaN, and minus infinity becomes one, as in torch.
RBLN_INLINE Vec vgelu(Vec x) {
  const Vec magnitude = vmax(x, -x);
  const Vec t = 1.0f / (1.0f + magnitude * (0.3275911f * 0.70710678118654752f));
  Vec tail = splat(0.5f * 1.061405429f);
  tail = tail * t + 0.5f * -1.453152027f;
  tail = tail * t + 0.5f * 1.421413741f;
  tail = tail * t + 0.5f * -0.284496736f;
  tail = tail * t + 0.5f * 0.254829592f;
  tail = tail * t * vexp(x * x * -0.5f);
  return x * select(x < 0, tail, 1.0f - tail);
}

RBLN_INLINE Vec vgelu_tanh(Vec x) {
  return 0.5f * x * (1.0f + vtanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

RBLN_INLINE Vec vrelu(Vec x) { return select(x < 0, splat(0.0f), x); }

RBLN_INLINE Vec activate(Activation activation, Vec x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return vrelu(x);
    case Activation::kSilu:
      return x * vsigmoid(x);
    case Activation::kGelu:
      return vgelu(x);
    case Activation::kGeluTanh:
      return vgelu_tanh(x);
    case Activation::kQuickGelu:
      return x * vsigmoid(1.702f * x);
    case Activation::kTanh:
      return vtanh(x);
    case Activation::kSigmoid:
      return vsigmoid(x);
    case Activation::kRelu2: {
      const Vec positive = vrelu(x);
      return positive * positive;
    }
  }
  return x;
}

// Calls `function` with a null pointer of the dtype's type: fn(static_cast<BFloat16*>(nullptr)).
template <class F>
RBLN_INLINE void with_float_type(DType dtype, F function) {
  switch (dtype) {
    case DType::kBFloat16:
      return function(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return function(static_cast<Float16*>(nullptr));
    default:
      return function(static_cast<float*>(nullptr));
  }
}

RBLN_INLINE int64_t load_index(const Operand& operand, int64_t i) {
  const int64_t at = i * operand.stride[0];
  return operand.dtype == DType::kInt64 ? operand.as<int64_t>()[at] : operand.as<int32_t>()[at];
}

}  // namespace RBLN_ISA
}  // namespace rbln
