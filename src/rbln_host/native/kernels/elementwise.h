// SPDX-License-Identifier: Apache-2.0
// Fused elementwise expressions, and copies between dtypes and strides.
#pragma once

#include <algorithm>

#include "rows.h"

namespace rbln {
namespace RBLN_ISA {

// 16 elements of an input of any float dtype and stride, as floats.
RBLN_INLINE Vec load_strided(const Operand& x, int64_t offset, int64_t count) {
  const int64_t step = x.stride[x.ndim - 1];
  Vec v{};
  with_float_type(x.dtype, [&](auto* type) {
    const auto* p = x.as<std::remove_pointer_t<decltype(type)>>() + offset;
    if (step == 1) {
      v = load_some(p, count);
    } else if (step == 0) {
      v = splat(to_float(*p));
    } else {
      for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i) v[i] = to_float(p[i * step]);
    }
  });
  return v;
}

RBLN_INLINE void store_strided(const Operand& x, int64_t offset, Vec v, int64_t count) {
  const int64_t step = x.stride[x.ndim - 1];
  with_float_type(x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* p = x.as<T>() + offset;
    if (step == 1) return store_some(p, v, count);
    for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i)
      p[i * step] = from_float<T>(v[i]);
  });
}

RBLN_INLINE Vec apply_unary(Step step, Vec a) {
  switch (step) {
    case Step::kNeg:
      return -a;
    case Step::kAbs:
      return bit_cast<Vec>(bit_cast<UVec>(a) & 0x7fffffffu);
    case Step::kExp:
      return vexp(a);
    case Step::kLog:
      return each(a, [](float v) { return std::log(v); });
    case Step::kSqrt:
      return vsqrt(a);
    case Step::kRsqrt:
      return 1.0f / vsqrt(a);
    case Step::kTanh:
      return vtanh(a);
    case Step::kSigmoid:
      return vsigmoid(a);
    case Step::kSin:
      return each(a, [](float v) { return std::sin(v); });
    case Step::kCos:
      return each(a, [](float v) { return std::cos(v); });
    case Step::kRelu:
      return vrelu(a);
    case Step::kSilu:
      return a * vsigmoid(a);
    case Step::kGelu:
      return vgelu(a);
    case Step::kGeluTanh:
      return vgelu_tanh(a);
    case Step::kSquare:
      return a * a;
    case Step::kCube:
      return a * a * a;
    default:
      return a;
  }
}

RBLN_INLINE Vec apply_binary(Step step, Vec a, Vec b) {
  switch (step) {
    case Step::kAdd:
      return a + b;
    case Step::kSub:
      return a - b;
    case Step::kMul:
      return a * b;
    case Step::kDiv:
      return a / b;
    case Step::kMaximum:
      return select(a != a, a, select(b != b, b, vmax(a, b)));
    default:  // kMinimum
      return select(a != a, a, select(b != b, b, vmin(a, b)));
  }
}

inline Vec evaluate(const Call& call, const int64_t* offsets, int64_t i, int64_t count) {
  Vec stack[kMaxStack];
  int top = 0;
  for (const ExpressionStep& step : call.expression) {
    if (step.step == Step::kInput) {
      const Operand& x = call[step.input];
      stack[top++] = load_strided(x, offsets[step.input] + i * x.stride[x.ndim - 1], count);
    } else if (step.step == Step::kConstant) {
      stack[top++] = splat(step.constant);
    } else if (step.step <= Step::kMinimum) {
      --top;
      stack[top - 1] = apply_binary(step.step, stack[top - 1], stack[top]);
    } else {
      stack[top - 1] = apply_unary(step.step, stack[top - 1]);
    }
  }
  return stack[0];
}

inline void elementwise_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  const Operand& out = call[call.count - 1];
  const int64_t width = out.last();
  for_rows(call, shared, task, [&](int64_t row) {
    int64_t offsets[kMaxOperands];
    for (int i = 0; i < call.count; ++i) offsets[i] = call[i].row_offset(row);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec v = evaluate(call, offsets, i, width - i);
      store_strided(out, offsets[call.count - 1] + i * out.stride[out.ndim - 1], v, width - i);
    }
  });
}

// ---- copy: any dtypes; between equal dtypes bit for bit

template <class T>
RBLN_INLINE void copy_elements(const T* from, int64_t from_step, T* to, int64_t to_step,
                               int64_t width) {
  if (from_step == 1 && to_step == 1) {
    std::memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < width; ++i) to[i * to_step] = from[i * from_step];
}

RBLN_INLINE int64_t load_integer(const Operand& x, int64_t at) {
  return x.dtype == DType::kInt64 ? x.as<int64_t>()[at] : x.as<int32_t>()[at];
}

RBLN_INLINE void store_integer(const Operand& x, int64_t at, int64_t value) {
  if (x.dtype == DType::kInt64) {
    x.as<int64_t>()[at] = value;
  } else {
    x.as<int32_t>()[at] = static_cast<int32_t>(value);
  }
}

RBLN_INLINE float load_any(const Operand& x, int64_t at) {
  if (!is_float(x.dtype)) return static_cast<float>(load_integer(x, at));
  float value = 0;
  with_float_type(x.dtype, [&](auto* type) {
    value = to_float(x.as<std::remove_pointer_t<decltype(type)>>()[at]);
  });
  return value;
}

inline void convert_elements(const Operand& x, int64_t from, const Operand& out, int64_t to,
                             int64_t width) {
  const int64_t from_step = x.stride[x.ndim - 1], to_step = out.stride[out.ndim - 1];
  for (int64_t i = 0; i < width; ++i) {
    if (!is_float(out.dtype) && !is_float(x.dtype)) {
      store_integer(out, to + i * to_step, load_integer(x, from + i * from_step));
    } else if (!is_float(out.dtype)) {
      store_integer(out, to + i * to_step, static_cast<int64_t>(load_any(x, from + i * from_step)));
    } else {
      const float value = load_any(x, from + i * from_step);
      with_float_type(out.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        out.as<T>()[to + i * to_step] = from_float<T>(value);
      });
    }
  }
}

inline void copy_row(const Operand& x, int64_t from, const Operand& out, int64_t to,
                     int64_t width) {
  const int64_t from_step = x.stride[x.ndim - 1], to_step = out.stride[out.ndim - 1];
  if (x.dtype == out.dtype) {
    switch (size_of(x.dtype)) {
      case 2:
        return copy_elements(x.as<uint16_t>() + from, from_step, out.as<uint16_t>() + to, to_step,
                             width);
      case 4:
        return copy_elements(x.as<uint32_t>() + from, from_step, out.as<uint32_t>() + to, to_step,
                             width);
      default:
        return copy_elements(x.as<uint64_t>() + from, from_step, out.as<uint64_t>() + to, to_step,
                             width);
    }
  }
  if (is_float(x.dtype) && is_float(out.dtype)) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec v = load_strided(x, from + i * from_step, width - i);
      store_strided(out, to + i * to_step, v, width - i);
    }
    return;
  }
  convert_elements(x, from, out, to, width);
}

inline void copy_run(const Call& call, Shared& shared, int64_t task, std::byte*) {
  const Operand &x = call[0], &out = call[1];
  for_rows(call, shared, task, [&](int64_t row) {
    copy_row(x, x.row_offset(row), out, out.row_offset(row), out.last());
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
