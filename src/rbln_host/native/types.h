// SPDX-License-Identifier: Apache-2.0
// The nouns of the native executor: dtypes, operands, calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace rbln {

enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32, kInt32, kInt64 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

constexpr bool is_float(DType dtype) { return dtype <= DType::kFloat32; }

constexpr int kMaxAxes = 5;
constexpr int kMaxOperands = 12;
constexpr int kMaxParts = 4;  // adapted modules of one linear

// A tensor as a kernel sees it. Strides are in elements and may be 0 (broadcast).
struct Operand {
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  int ndim = 0;
  int64_t shape[kMaxAxes] = {};
  int64_t stride[kMaxAxes] = {};
  bool present = false;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
  int64_t last() const { return shape[ndim - 1]; }
  // Number of rows: the product of all axes but the last.
  int64_t rows() const {
    int64_t count = 1;
    for (int axis = 0; axis + 1 < ndim; ++axis) count *= shape[axis];
    return count;
  }
  // Offset in elements of row `row`, rows counted in row-major order of the leading axes.
  int64_t row_offset(int64_t row) const {
    int64_t offset = 0;
    for (int axis = ndim - 2; axis >= 0; --axis) {
      offset += (row % shape[axis]) * stride[axis];
      row /= shape[axis];
    }
    return offset;
  }
};

enum class Op : uint8_t {
  kLinear,
  kGatedLinear,
  kGatedActivation,
  kRmsNorm,
  kAddRmsNorm,
  kLayerNorm,
  kRotary,
  kRotaryWriteKv,
  kWriteKv,
  kPagedAttention,
  kEncoderAttention,
  kEmbedding,
  kElementwise,
  kCopy,
  kArgmax,
  kMaskTokens,
  kSample,
  kRoute,
  kGatedExperts,
  kCombineExperts,
  kLoraShrink,
  kLoraLinear,
  kLoraGatedLinear,
  kCount,
};

enum class Activation : uint8_t {
  kNone,
  kRelu,
  kSilu,
  kGelu,
  kGeluTanh,
  kQuickGelu,
  kTanh,
  kSigmoid,
  kRelu2,
};

// One step of an elementwise program (postfix).
enum class Step : uint8_t {
  kInput,
  kConstant,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMaximum,
  kMinimum,
  kNeg,
  kAbs,
  kExp,
  kLog,
  kSqrt,
  kRsqrt,
  kTanh,
  kSigmoid,
  kSin,
  kCos,
  kRelu,
  kSilu,
  kGelu,
  kGeluTanh,
  kSquare,
  kCube,
};

struct ExpressionStep {
  Step step;
  int input = 0;
  float constant = 0;
};

constexpr int kMaxStack = 8;

// What went wrong while a program ran; `value` is the index that was out of range.
enum class Fault : int { kNone, kId, kPosition, kSlot, kBlock, kMemory, kAdapter, kRow };

// One command, checked, with its operands' addresses filled in.
struct Call {
  Op op = Op::kCopy;
  Operand operands[kMaxOperands];
  int count = 0;

  float epsilon = 0;
  float scale = 1;
  float soft_cap = 0;
  int64_t variance_size = 0;
  int64_t window = 0;
  int64_t rows = 0;  // embedding: rows and width of the table
  int64_t width = 0;
  int64_t parts = 0;  // adapters: of each part its module, and its columns of the weight
  int64_t modules[kMaxParts] = {};
  int64_t starts[kMaxParts] = {};
  int64_t sizes[kMaxParts] = {};
  bool packed = false;
  bool by_token = false;  // axis 0 of every operand with rows is the program's tokens
  bool neox = true;
  bool renormalise = false;
  float limit = 0;   // of gates and ups; 0: none
  float offset = 0;  // of ups
  Activation activation = Activation::kNone;
  std::vector<ExpressionStep> expression;

  const Operand& operator[](int index) const { return operands[index]; }
};

}  // namespace rbln
