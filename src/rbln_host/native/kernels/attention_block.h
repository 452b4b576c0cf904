// SPDX-License-Identifier: Apache-2.0
// paged_attention for many queries: a block of queries of all heads of one KV head, key tile by key
// tile with a running softmax (FlashAttention, Dao et al.), on the matrix micro-kernel.
#pragma once

#include "attention.h"

namespace rbln {
namespace RBLN_ISA {

// Scratch of one item. Rows are query-major: row = query * group + head of the group.
template <class T>
struct BlockScratch {
  Row<T>* query;   // [rows][size]
  Row<T>* weight;  // [rows][kKeyTile]
  float* score;    // [rows][kKeyTile]
  float* o;        // [rows][size]
  float* most;     // [rows]
  float* total;    // [rows]
  T* keys;         // packed, kKeyTile columns of `size`
  T* values;       // packed, `size` columns of kKeyTile

  static size_t bytes(const Attention& a) {
    BlockScratch none;
    return none.lay_out(a, nullptr);
  }

  // Sets the pointers from `base` on and returns the bytes taken.
  size_t lay_out(const Attention& a, std::byte* base) {
    const size_t rows = static_cast<size_t>(a.block_queries() * a.group);
    const size_t size = static_cast<size_t>(a.size);
    size_t used = 0;
    const auto take = [&](auto*& pointer, size_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + used);
      used += (count * sizeof(*pointer) + 63) / 64 * 64;
    };
    take(query, rows * size);
    take(weight, rows * kKeyTile);
    take(score, rows * kKeyTile);
    take(o, rows * size);
    take(most, rows);
    take(total, rows);
    take(keys, kKeyTile / 16 * static_cast<size_t>(group_elements<T>(a.size)));
    take(values, size / 16 * static_cast<size_t>(group_elements<T>(kKeyTile)));
    return used;
  }
};

// Rows become columns: r[i] lane j <-> r[j] lane i.
RBLN_INLINE void transpose(UVec (&r)[16]) {
  const auto swap = [](UVec& a, UVec& b, IVec low, int step) {
    const UVec first = __builtin_shuffle(a, b, bit_cast<UVec>(low));
    b = __builtin_shuffle(a, b, bit_cast<UVec>(low + step));
    a = first;
  };
  const IVec low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const IVec low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  const IVec low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const IVec low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) swap(r[i], r[i + 8], low8, 8);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if ((i & 4) == 0) swap(r[i], r[i + 4], low4, 4);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if ((i & 2) == 0) swap(r[i], r[i + 2], low2, 2);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) swap(r[i], r[i + 1], low1, 1);
}

// Packs up to 16 keys, rows of `size` elements, as one group of columns; absent keys become zero.
template <class T>
RBLN_INLINE void pack_keys(const T* const (&rows)[16], int64_t size, T* group) {
  constexpr int64_t kPerWord = std::is_same_v<T, float> ? 1 : 2;
  if constexpr (!std::is_same_v<T, Float16>) {
    for (int64_t i = 0; i < size; i += 16 * kPerWord) {
      UVec r[16];
      for (int j = 0; j < 16; ++j) {
        r[j] = UVec{};
        const int64_t words = std::min<int64_t>(16, (size - i) / kPerWord);
        if (rows[j]) std::memcpy(&r[j], rows[j] + i, words == 16 ? 64 : words * 4);
      }
      transpose(r);
      for (int w = 0; w < 16 && i + w * kPerWord < size; ++w) {
        std::memcpy(group + (i / kPerWord + w) * 16 * kPerWord, &r[w], 64);
      }
    }
  } else {
    for (int64_t i = 0; i < size; ++i) {
      for (int j = 0; j < 16; ++j) group[i * 16 + j] = rows[j] ? rows[j][i] : T{};
    }
  }
}

// Packs values [count][size] (any row stride) as size / 16 groups of columns over k = count. Absent
// values are zero.
template <class T>
RBLN_INLINE void pack_value_pair(const T* even, const T* odd, int64_t size, int64_t k, T* packed) {
  const int64_t stride = group_elements<T>(kKeyTile);
  for (int64_t d = 0; d < size; d += 16, packed += stride) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const UVec low = even ? load_halves(even + d) : UVec{};
      const UVec both = low | (odd ? load_halves(odd + d) << 16 : UVec{});
      std::memcpy(packed + k * 16, &both, 64);
    } else {
      if (even) std::memcpy(packed + k * 16, even + d, 16 * sizeof(T));
      if (!even) std::memset(packed + k * 16, 0, 16 * sizeof(T));
      if (odd) std::memcpy(packed + (k + 1) * 16, odd + d, 16 * sizeof(T));
    }
  }
}

// Packs the keys and values of [first, first + count). Those before `lowest` are not read.
template <class T>
bool pack_tile(const Attention& a, Shared& shared, const AttentionItem& item, int64_t first,
               int64_t count, int64_t lowest, const BlockScratch<T>& s) {
  const T* rows[kKeyTile + 16] = {};
  const bool found = for_runs<T>(a, shared, item.row, item.head, std::max(first, lowest),
                                 first + count, [&](const T* keys, int64_t key, int64_t run) {
                                   for (int64_t j = 0; j < run; ++j) {
                                     rows[key - first + j] = keys + j * a.kv.stride[2];
                                   }
                                 });
  if (!found) return false;
  for (int64_t j = 0; j < count; j += 16) {
    const T* sixteen[16];
    std::copy(rows + j, rows + j + 16, sixteen);
    pack_keys(sixteen, a.size, s.keys + j / 16 * group_elements<T>(a.size));
  }
  for (int64_t j = 0; j < count; j += 2) {
    const T* even = rows[j] ? rows[j] + a.size : nullptr;
    const T* odd = j + 1 < count ? rows[j + 1] + a.size : nullptr;
    pack_value_pair(even, odd, a.size, j, s.values);
  }
  return true;
}

// c[rows][columns] (+)= x[rows][k] times packed columns.
template <class T>
void multiply(const Row<T>* x, int64_t ldx, int64_t rows, const T* packed, int64_t group_stride,
              int64_t groups, int64_t k, float* c, int64_t ldc, bool add) {
  for (int64_t group = 0; group < groups; group += 2) {
    const T* start = packed + group * group_stride;
    for (int64_t row = 0; row < rows; row += kWideRows) {
      const int some = static_cast<int>(std::min<int64_t>(kWideRows, rows - row));
      float* target = c + row * ldc + group * kLanes;
      if (group + 1 < groups) {
        tile_rows<T, 2, kWideRows>(some, x + row * ldx, ldx, {{start, start + group_stride}}, k,
                                   target, ldc, add);
      } else {
        tile_rows<T, 1, kWideRows>(some, x + row * ldx, ldx, {{start}}, k, target, ldc, add);
      }
    }
  }
}

// Whether weights are rounded so much that a short polynomial makes no difference.
template <class T>
constexpr bool kShortWeights = std::is_same_v<Row<T>, BFloat16>;

// One row of the running softmax: scores of keys [first, first + count) become weights, earlier
// output is scaled to the new maximum. Plain scores (no cap, no bias) are scaled on the way.
template <class T, bool kPlain>
void soften_row(const Attention& a, const BlockScratch<T>& s, int64_t row, float slope,
                int64_t position, int64_t first, int64_t count) {
  const IVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float* score = s.score + row * kKeyTile;
  Row<T>* weight = s.weight + row * kKeyTile;
  const int last = static_cast<int>(std::min(position - first, count - 1));
  const int begin = static_cast<int>(std::max<int64_t>(0, a.first_key(position) - first));
  Vec most = splat(-INFINITY);
  const bool all_visible = last >= count - 1 && begin == 0 && count % kLanes == 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec v = load(score + i);
    if constexpr (!kPlain) v = adjust_scores(a, v, slope, first + i, position);
    if (!all_visible) {
      const IVec key = lane + static_cast<int>(i);
      v = select((key <= last) & (key >= begin), v, splat(-INFINITY));
    }
    if (!kPlain || !all_visible) store(score + i, v);
    most = vmax(v, most);
  }
  const float before = s.most[row];
  const float top = std::max(before, max_of(most) * (kPlain ? a.call.scale : 1.0f));
  if (top == -INFINITY) {  // no visible key so far
    for (int64_t i = 0; i < count; i += kLanes) store(weight + i, Vec{});
    return;
  }
  Vec total{};
  constexpr float kLog2E = 1.44269504088896341f;
  const Vec scale2 = splat(a.call.scale * kLog2E), top2 = splat(top * kLog2E);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec v = load(score + i);
    const Vec e = kPlain ? vexp2_short(v * scale2 - top2) : vexp(v - top);
    total += e;
    store(weight + i, e);
  }
  s.most[row] = top;
  if (before == -INFINITY) {  // the first visible keys: there is no output to scale yet
    s.total[row] = sum(total);
    return;
  }
  const float factor = before == top ? 1.0f : std::exp(before - top);
  s.total[row] = s.total[row] * factor + sum(total);
  if (factor == 1.0f) return;
  float* o = s.o + row * a.size;
  for (int64_t i = 0; i < a.size; i += kLanes) store(o + i, load(o + i) * factor);
}

template <class T>
void attend_block(const Attention& a, Shared& shared, const AttentionItem& item,
                  std::byte* scratch) {
  BlockScratch<T> s;
  s.lay_out(a, scratch);
  const int64_t first_token = item.row * a.queries + item.first_query;
  const int64_t rows = item.queries * a.group;
  int64_t lowest = INT64_MAX, highest = -1;
  int64_t positions[64];
  for (int64_t q = 0; q < item.queries; ++q) {
    int64_t position = a.position(first_token + q);
    if (position >= 0 && !readable(a, shared, position)) position = -1;
    positions[q] = position;
    if (position < 0) {
      zero_output(a, first_token + q);
    } else {
      lowest = std::min(lowest, a.first_key(position));
      highest = std::max(highest, position);
    }
    const int64_t at =
        (first_token + q) * a.query.stride[0] + item.head * a.group * a.query.stride[1];
    for (int64_t g = 0; g < a.group; ++g) {
      Row<T>* target = s.query + (q * a.group + g) * a.size;
      if (position < 0) {  // padding may hold anything
        std::memset(target, 0, sizeof(*target) * a.size);
        continue;
      }
      int64_t unused;
      const T* source = a.query.as<T>() + at + g * a.query.stride[1];
      const Row<T>* row = as_rows(source, a.size, 1, a.size, s.o, &unused);
      std::memcpy(target, row, sizeof(*target) * a.size);
    }
  }
  if (highest < 0) return;
  std::fill(s.most, s.most + rows, -INFINITY);
  std::fill(s.total, s.total + rows, 0.0f);
  std::fill(s.o, s.o + rows * a.size, 0.0f);
  const bool plain = a.call.soft_cap <= 0 && !a.alibi.present && a.call.scale > 0;
  // Tiles end at multiples of their length and start at an even key: keys are added in pairs, and
  // which of them make a pair must not depend on what other queries of the block see.
  int64_t count;
  for (int64_t first = lowest & ~int64_t{1}; first <= highest; first += count) {
    count = std::min((first / kKeyTile + 1) * kKeyTile, highest + 1) - first;
    if (!pack_tile<T>(a, shared, item, first, count, lowest, s)) return;
    multiply<T>(s.query, a.size, rows, s.keys, group_elements<T>(a.size), (count + 15) / 16, a.size,
                s.score, kKeyTile, false);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = positions[row / a.group];
      if (plain) {
        soften_row<T, kShortWeights<T>>(a, s, row, 0.0f, position, first, count);
      } else {
        const float slope = a.slope(item.head * a.group + row % a.group);
        soften_row<T, false>(a, s, row, slope, position, first, count);
      }
    }
    multiply<T>(s.weight, kKeyTile, rows, s.values, group_elements<T>(kKeyTile), a.size / 16, count,
                s.o, a.size, true);
  }
  for (int64_t row = 0; row < rows; ++row) {
    if (positions[row / a.group] < 0) continue;
    finish_head<T>(a, first_token + row / a.group, item.head * a.group + row % a.group, s.most[row],
                   s.total[row], s.o + row * a.size);
  }
}

}  // namespace RBLN_ISA
}  // namespace rbln
