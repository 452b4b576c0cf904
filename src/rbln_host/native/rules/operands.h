// SPDX-License-Identifier: Apache-2.0
// What operators demand of their operands in common: axes, dtypes, strides, sizes, memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../program.h"

namespace rbln {

class Checker {
 public:
  explicit Checker(const CommandSpec& spec) : spec_(spec) {}

  void that(bool condition, const std::string& why) const {
    if (!condition) throw std::invalid_argument(spec_.op + ": " + why);
  }

  void count(size_t expected) const {
    that(spec_.tensors.size() == expected, "it takes " + std::to_string(expected) +
                                               " tensors, not " +
                                               std::to_string(spec_.tensors.size()));
  }

  double number(const std::string& name, double least, double most) const {
    const auto found = spec_.numbers.find(name);
    that(found != spec_.numbers.end(), "the number " + name + " is missing");
    that(found->second >= least && found->second <= most,
         "the number " + name + " is out of range");
    return found->second;
  }

  int64_t integer(const std::string& name) const {
    const double value = number(name, 0, 9e15);
    that(value == std::floor(value), "the number " + name + " is not whole");
    return static_cast<int64_t>(value);
  }

  bool flag(const std::string& name) const { return number(name, 0, 1) != 0; }

 private:
  const CommandSpec& spec_;
};

constexpr int64_t kMost = int64_t{1} << 46;  // of elements, and of elements stepped over

inline Operand operand_of(const Checker& check, const TensorSpec& t) {
  check.that(!t.shape.empty() && t.shape.size() <= kMaxAxes, "a tensor has 1 to 5 axes");
  check.that(t.shape.size() == t.strides.size(), "a tensor needs a stride for each axis");
  __int128 count = 1, reach = 0;
  Operand operand;
  operand.present = true;
  operand.dtype = t.dtype;
  operand.ndim = static_cast<int>(t.shape.size());
  for (int axis = 0; axis < operand.ndim; ++axis) {
    check.that(t.shape[axis] >= 0 && t.shape[axis] <= kMost, "an axis has an impossible size");
    check.that(t.strides[axis] >= 0 && t.strides[axis] <= kMost, "a stride is impossible");
    operand.shape[axis] = t.shape[axis];
    operand.stride[axis] = t.strides[axis];
    count *= std::max<int64_t>(1, t.shape[axis]);
    reach += static_cast<__int128>(std::max<int64_t>(1, t.shape[axis]) - 1) * t.strides[axis];
    check.that(count <= kMost && reach <= kMost, "a tensor is too large");
  }
  return operand;
}

inline bool same_shape(const Operand& a, const Operand& b) {
  if (a.ndim != b.ndim) return false;
  for (int axis = 0; axis < a.ndim; ++axis) {
    if (a.shape[axis] != b.shape[axis]) return false;
  }
  return true;
}

inline bool is_contiguous(const Operand& t) {
  int64_t expected = 1;
  for (int axis = t.ndim - 1; axis >= 0; --axis) {
    if (t.shape[axis] != 1 && t.stride[axis] != expected) return false;
    expected *= t.shape[axis];
  }
  return true;
}

inline void need_axes(const Checker& c, const Operand& t, int ndim, const char* name) {
  c.that(t.present, std::string(name) + " is missing");
  c.that(t.ndim == ndim, std::string(name) + " has " + std::to_string(t.ndim) + " axes, not " +
                             std::to_string(ndim));
}

inline void need_rows(const Checker& c, const Operand& t, DType dtype, const char* name) {
  c.that(t.present, std::string(name) + " is missing");
  c.that(is_float(dtype) && t.dtype == dtype, std::string(name) + " has the wrong dtype");
  c.that(t.last() <= 1 || t.stride[t.ndim - 1] == 1,
         std::string(name) + ": elements of a row must follow each other");
}

inline void need_vector(const Checker& c, const Operand& t, DType dtype, int64_t size,
                        const char* name) {
  if (!t.present) return;
  need_rows(c, t, dtype, name);
  c.that(t.ndim == 1 && t.shape[0] == size, std::string(name) + " has the wrong size");
}

inline void need_indices(const Checker& c, const Operand& t, int64_t size, const char* name) {
  need_axes(c, t, 1, name);
  c.that(!is_float(t.dtype), std::string(name) + " must hold integers");
  c.that(t.shape[0] == size, std::string(name) + " has the wrong size");
}

// What is written lies in memory once, so that tasks do not write over each other and no more is
// written than there is memory. From the innermost axis out, each must step over all it contains.
inline void need_own_memory(const Checker& c, const Operand& t, const char* name) {
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride and size
  for (int axis = 0; axis < t.ndim; ++axis) {
    if (t.shape[axis] == 0) return;
    if (t.shape[axis] > 1) axes.emplace_back(t.stride[axis], t.shape[axis]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : axes) {
    c.that(stride > reach, std::string(name) + " is written and some of its elements share memory");
    reach += (size - 1) * stride;
  }
}

}  // namespace rbln
