// SPDX-License-Identifier: Apache-2.0
// paged_attention for few queries: one query, one KV head, one part of the context per item.
#pragma once

#include "attention_values.h"

namespace rbln {
namespace RBLN_ISA {

// Adds pairs of vectors lane by lane until one is left whose lane i is the sum of vector i.
RBLN_INLINE Vec sum_each(Vec (&v)[16]) {
  const IVec low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const IVec low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  const IVec low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const IVec low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  const auto fold = [](Vec a, Vec b, IVec low, int step) {
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + step);
  };
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = fold(v[i], v[i + 8], low8, 8);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = fold(v[i], v[i + 4], low4, 4);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) v[i] = fold(v[i], v[i + 2], low2, 2);
  return fold(v[0], v[1], low1, 1);
}

// Products of one query with 16 keys. Rows from `count` on repeat the last one: nothing outside is
// read, and the caller drops their lanes.
template <class T>
RBLN_INLINE Vec dot_keys(const float* query, const T* keys, int64_t stride, int64_t count,
                         int64_t size) {
  Vec acc[16] = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec q = load(query + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      acc[j] += q * load(keys + std::min<int64_t>(j, count - 1) * stride + i);
    }
  }
  return sum_each(acc);
}

#if defined(__AVX512BF16__)
RBLN_INLINE UVec load_pairs(const BFloat16* p, int64_t count) {
  const __mmask32 mask = count >= 32 ? 0xffffffffu : (1u << count) - 1;
  return bit_cast<UVec>(_mm512_maskz_loadu_epi16(mask, p));
}

// bf16 queries are kept as they are: `query` holds their bits.
RBLN_INLINE Vec dot_keys(const BFloat16* query, const BFloat16* keys, int64_t stride, int64_t count,
                         int64_t size) {
  Vec acc[16] = {};
  for (int64_t i = 0; i < size; i += 32) {
    const UVec q = load_pairs(query + i, size - i);
    if (count >= 16 && size - i >= 32) {
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        UVec k;
        std::memcpy(&k, keys + j * stride + i, 64);
        acc[j] = dot_pairs(acc[j], q, k);
      }
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        const BFloat16* row = keys + std::min<int64_t>(j, count - 1) * stride + i;
        acc[j] = dot_pairs(acc[j], q, load_pairs(row, size - i));
      }
    }
  }
  return sum_each(acc);
}
#endif

// The keys an item reads: [first, end) of one sequence and KV head.
struct KeyRange {
  int64_t sequence, head, first, end;

  static KeyRange of(const Attention& a, const AttentionItem& item) {
    const int64_t position = a.position(item.row);
    const int64_t part_first = (item.first_query + item.part) * kPartKeys;
    return {item.row / a.queries, item.head, std::max(part_first, a.first_key(position)),
            std::min(position + 1, part_first + kPartKeys)};
  }
};

// Where the row lies that is `distance` keys after `key`: in this range, else in the next one.
template <class T>
RBLN_INLINE const T* row_ahead(const Attention& a, Shared& shared, const KeyRange& range,
                               const KeyRange* next, int64_t key) {
  if (key < range.end) return key_row<T>(a, shared, range.sequence, range.head, key);
  if (!next) return nullptr;
  key = next->first + (key - range.end);
  return key < next->end ? key_row<T>(a, shared, next->sequence, next->head, key) : nullptr;
}

// Asks for memory that is read soon.
RBLN_INLINE void prefetch_bytes(const char* start, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(start + i, 0, 2);
}

// Running softmax of one head: the maximum so far and, lane by lane, the sum of the weights.
struct Running {
  float most = -INFINITY;
  Vec total{};
};

// Turns `count` scores into weights relative to the new maximum and scales `o` to it. Lanes up to
// kStepKeys are written.
RBLN_INLINE void soften(float* s, int64_t count, Running& running, float* o, int64_t size) {
  if (count < kStepKeys) {
    for (int64_t i = count; i < kStepKeys; ++i) s[i] = -INFINITY;
  }
  Vec most = load(s);
  for (int64_t i = kLanes; i < kStepKeys; i += kLanes) most = vmax(load(s + i), most);
  const float top = std::max(running.most, max_of(most));
  if (top > running.most) {
    const float factor = std::exp(running.most - top);
    running.total *= factor;
    for (int64_t i = 0; i < size; i += kLanes) store(o + i, load(o + i) * factor);
    running.most = top;
  }
  for (int64_t i = 0; i < kStepKeys; i += kLanes) {
    const Vec e = vexp(load(s + i) - top);
    store(s + i, e);
    running.total += e;
  }
}

// A part's result, as kept until all parts of its query and KV head are there: per head of the
// group the maximum and the sum, then `size` floats of output that are not yet divided by the sum.
//
// Keys and values are read together, some keys at a time: a block's rows are one stream of memory.
// `next` is what this thread will probably read after.
template <class T>
void attend_part(const Attention& a, Shared& shared, const AttentionItem& item,
                 const KeyRange* next, float* scores, float* partial) {
  const int64_t n = item.row, position = a.position(n);
  const KeyRange range = KeyRange::of(a, item);
  Running* running = reinterpret_cast<Running*>(scores + a.group * kStepKeys);
  float* query_f32 = reinterpret_cast<float*>(running + a.group);
  int64_t row_stride;
  const Row<T>* rows =
      as_rows(a.query.as<T>() + n * a.query.stride[0] + item.head * a.group * a.query.stride[1],
              a.query.stride[1], static_cast<int>(a.group), a.size, query_f32, &row_stride);
  const int64_t stride = a.kv.stride[2];
  float* o = partial + 2 * a.group;
  std::memset(o, 0, sizeof(float) * a.group * a.size);
  for (int64_t g = 0; g < a.group; ++g) running[g] = Running{};
  // Keys and values of a later step are asked for bit by bit: all at once they would fill the queue
  // of outstanding reads, and what is computed now would wait for it.
  const int64_t slices = a.group * (kStepKeys / kLanes);
  const int64_t slice_bytes = kStepKeys * stride * static_cast<int64_t>(sizeof(T)) / slices;
  const auto step = [&](const T* keys, int64_t key, int64_t count, const T* later) {
    const char* ahead = reinterpret_cast<const char*>(later);
    for (int64_t g = 0; g < a.group; ++g) {
      float* s = scores + g * kStepKeys;
      const float slope = a.slope(item.head * a.group + g);
      for (int64_t j = 0; j < count; j += kLanes, ahead += slice_bytes) {
        if (later) prefetch_bytes(ahead, slice_bytes);
        const int64_t some = std::min<int64_t>(kLanes, count - j);
        const Vec dots = dot_keys(rows + g * row_stride, keys + j * stride, stride, some, a.size);
        store(s + j, adjust_scores(a, dots, slope, key + j, position));
      }
      soften(s, count, running[g], o + g * a.size, a.size);
    }
    add_step<T>(scores, keys + a.size, stride, count, o, a.group, a.size);
  };
  for (int64_t key = range.first, count; key < range.end; key += count) {
    const T* keys = key_row<T>(a, shared, range.sequence, item.head, key);
    if (!keys) break;
    count = std::min({kStepKeys, range.end - key, a.block_size - key % a.block_size});
    step(keys, key, count, row_ahead<T>(a, shared, range, next, key + kKeysAhead));
  }
  for (int64_t g = 0; g < a.group; ++g) {
    if (adds_pairs<T>(a.size)) straighten(o + g * a.size, a.size);
    partial[2 * g] = running[g].most;
    partial[2 * g + 1] = sum(running[g].total);
  }
}

// Puts the parts of a query and KV head together, in order.
template <class T>
void combine_parts(const Attention& a, const AttentionItem& item, const float* partials, float* o) {
  const int64_t floats = a.partial_floats();
  for (int64_t g = 0; g < a.group; ++g) {
    float most = -INFINITY, total = 0;
    for (int32_t part = 0; part < item.parts; ++part) {
      most = std::max(most, partials[part * floats + 2 * g]);
    }
    std::memset(o, 0, sizeof(float) * a.size);
    for (int32_t part = 0; part < item.parts; ++part) {
      const float* p = partials + part * floats;
      const float factor = std::exp(p[2 * g] - most);
      total += factor * p[2 * g + 1];
      const float* values = p + 2 * a.group + g * a.size;
      for (int64_t i = 0; i < a.size; i += kLanes) {
        store(o + i, load(o + i) + load(values + i) * factor);
      }
    }
    finish_head<T>(a, item.row, item.head * a.group + g, most, total, o);
  }
}

// Scores, running softmax and the query as floats; or one head's output while parts are combined.
inline size_t rows_path_bytes(const Attention& a) {
  const size_t group = static_cast<size_t>(a.group), size = static_cast<size_t>(a.size);
  return group * (kStepKeys * sizeof(float) + sizeof(Running) + size * sizeof(float)) + 64;
}

template <class T>
void attend_row(const Attention& a, Shared& shared, int64_t task, float* scratch) {
  const AttentionItem& item = shared.items[task];
  const int64_t later = task + shared.threads;
  KeyRange next;
  const bool more = later < static_cast<int64_t>(shared.items.size());
  if (more) next = KeyRange::of(a, shared.items[later]);
  float* partials = reinterpret_cast<float*>(shared.partials.data()) +
                    static_cast<int64_t>(item.slot) * a.partial_floats();
  attend_part<T>(a, shared, item, more ? &next : nullptr, scratch,
                 partials + item.part * a.partial_floats());
  // Whoever finishes last combines.
  const int done = shared.finished[item.slot].fetch_add(1, std::memory_order_acq_rel) + 1;
  if (done == item.parts) combine_parts<T>(a, item, partials, scratch);
}

}  // namespace RBLN_ISA
}  // namespace rbln
