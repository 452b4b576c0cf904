// SPDX-License-Identifier: Apache-2.0
// route: which experts a token goes to, and their weights. Operands: logits, weights, experts.
#pragma once

#include <algorithm>

#include "tile.h"

namespace rbln {
namespace RBLN_ISA {

// Room for a row of logits as floats, then the scores that were chosen.
inline size_t route_scratch(const Call& call) {
  const int64_t chosen = call[1].last() + kLanes;
  return static_cast<size_t>(call[0].last() + kLanes + chosen) * sizeof(float);
}

// Whether a score goes before another that comes after it. A NaN goes before all numbers, so that
// there is an order and every row gets experts that exist.
RBLN_INLINE bool goes_before(float a, float b) { return b != b ? false : a != a || a > b; }

// The numbers of the `count` largest scores, the largest first and of equals the first.
inline void choose(const float* scores, int64_t size, int64_t count, int64_t* chosen,
                   int64_t stride) {
  for (int64_t i = 0; i < size; ++i) {
    int64_t place = std::min(i, count);
    while (place > 0 && goes_before(scores[i], scores[chosen[(place - 1) * stride]])) {
      if (place < count) chosen[place * stride] = chosen[(place - 1) * stride];
      --place;
    }
    if (place < count) chosen[place * stride] = i;
  }
}

// Replaces scores by e^(score - top) and returns their sum.
RBLN_INLINE float exponentials(float* scores, int64_t count, float top) {
  Vec total{};
  for_vectors(count, [&](int64_t i, auto lanes) {
    const Vec e = vexp(load_some(scores + i, lanes) - top);
    store_some(scores + i, e, lanes);
    float counted[kLanes] = {};
    store_some(counted, e, lanes);
    total += load(counted);
  });
  return sum(total);
}

template <class T>
void route_row(const Call& call, int64_t row, float* all) {
  const Operand &logits = call[0], &weights = call[1], &experts = call[2];
  const int64_t size = logits.shape[1], count = weights.shape[1];
  float* some = all + size + kLanes;
  const T* x = logits.as<T>() + row * logits.stride[0];
  for_vectors(size,
              [&](int64_t i, auto lanes) { store_some(all + i, load_some(x + i, lanes), lanes); });
  int64_t* chosen = experts.as<int64_t>() + row * experts.stride[0];
  choose(all, size, count, chosen, experts.stride[1]);
  for (int64_t i = 0; i < count; ++i) some[i] = all[chosen[i * experts.stride[1]]];
  const float top = some[0];
  const float over_some = exponentials(some, count, top);
  const float total = call.renormalise ? over_some : exponentials(all, size, top);
  T* out = weights.as<T>() + row * weights.stride[0];
  for_vectors(count, [&](int64_t i, auto lanes) {
    store_some(out + i, load_some(some + i, lanes) / total, lanes);
  });
}

constexpr int64_t kRoutedRows = 8;  // of a task

inline int64_t route_plan(const Call& call, Shared& shared, int) {
  return (in_use(call, shared, call[0].shape[0]) + kRoutedRows - 1) / kRoutedRows;
}

inline void route_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  const int64_t rows = in_use(call, shared, call[0].shape[0]);
  const int64_t end = std::min(rows, (task + 1) * kRoutedRows);
  with_float_type(call[0].dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t row = task * kRoutedRows; row < end; ++row) {
      route_row<T>(call, row, reinterpret_cast<float*>(scratch));
    }
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
