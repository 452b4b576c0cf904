// SPDX-License-Identifier: Apache-2.0
// paged_attention: how a call splits into items, and what both ways of computing them share.
//
// Few queries per sequence (decode): one item per query, KV head and part of the context. Parts
// have a fixed length (flash decoding, Dao et al.), so the order of additions depends on the
// query's position alone, not on the number of threads or on other rows. Many queries (prefill):
// one item per block of queries and KV head, see attention_block.h.
#pragma once

#include <algorithm>

#include "tile.h"

namespace rbln {
namespace RBLN_ISA {

constexpr int64_t kPartKeys = 256;
constexpr int64_t kStepKeys = 32;
constexpr int64_t kKeysAhead = 64;  // how far ahead keys are prefetched
constexpr int64_t kKeyTile = 128;
constexpr int64_t kBlockPathQueries = 16;  // from this many queries per sequence on

// The operands of a paged_attention call by name.
struct Attention {
  const Call& call;
  const Operand &query, &kv, &table, &positions, &sinks, &alibi, &out;
  int64_t tokens, heads, kv_heads, group, size, block_size, blocks, batch, queries;

  explicit Attention(const Call& c)
      : call(c),
        query(c[0]),
        kv(c[1]),
        table(c[2]),
        positions(c[3]),
        sinks(c[4]),
        alibi(c[5]),
        out(c[6]),
        tokens(query.shape[0]),
        heads(query.shape[1]),
        kv_heads(kv.shape[1]),
        group(heads / kv_heads),
        size(query.shape[2]),
        block_size(kv.shape[2]),
        blocks(kv.shape[0]),
        batch(table.shape[0]),
        queries(tokens / std::max<int64_t>(1, batch)) {}

  // An encoder_attention call, whose keys lie in no pool: `kv` are its keys, and what it does not
  // have is an operand that is never present.
  struct Encoder {};
  Attention(const Call& c, Encoder)
      : call(c),
        query(c[0]),
        kv(c[1]),
        table(c[3]),
        positions(c[3]),
        sinks(c[kMaxOperands - 1]),
        alibi(c[kMaxOperands - 1]),
        out(c[4]),
        tokens(query.shape[0]),
        heads(query.shape[1]),
        kv_heads(kv.shape[1]),
        group(heads / kv_heads),
        size(query.shape[2]),
        block_size(1),
        blocks(0),
        batch(table.shape[0] - 1),
        queries(tokens) {}

  bool by_block() const { return queries >= kBlockPathQueries; }
  int64_t block_queries() const { return std::clamp<int64_t>(96 / group, 16, 64); }
  int64_t position(int64_t n) const { return load_index(positions, n); }
  int64_t first_key(int64_t position) const {
    return call.window > 0 ? std::max<int64_t>(0, position - call.window + 1) : 0;
  }
  float slope(int64_t head) const { return alibi.present ? alibi.as<float>()[head] : 0.0f; }
  // Whole pairs of cache lines: two threads that add to neighbouring parts would otherwise pass the
  // line they share back and forth.
  int64_t partial_floats() const { return (group * (size + 2) + 31) / 32 * 32; }
};

template <class T>
RBLN_INLINE float sink_of(const Attention& a, int64_t head) {
  if (a.sinks.dtype == DType::kFloat32) return a.sinks.as<float>()[head];
  return to_float(a.sinks.as<T>()[head]);
}

// The address of key `position` of KV head `head` in sequence `sequence`. Rows of the same block
// follow at kv.stride[2]. Null, with a fault, when the table names a block that does not exist.
template <class T>
RBLN_INLINE const T* key_row(const Attention& a, Shared& shared, int64_t sequence, int64_t head,
                             int64_t position) {
  const int64_t at = sequence * a.table.stride[0] + position / a.block_size * a.table.stride[1];
  const int64_t block = a.table.as<int32_t>()[at];
  if (block < 0 || block >= a.blocks) {
    shared.fail(Fault::kBlock, block);
    return nullptr;
  }
  return a.kv.as<T>() + block * a.kv.stride[0] + head * a.kv.stride[1] +
         position % a.block_size * a.kv.stride[2];
}

// Calls `function(pointer to the first key's row, first key, number of keys)` for each run of keys
// in [first, end) that lie in one block. False when a block does not exist.
template <class T, class F>
RBLN_INLINE bool for_runs(const Attention& a, Shared& shared, int64_t sequence, int64_t head,
                          int64_t first, int64_t end, F function) {
  while (first < end) {
    const int64_t count = std::min(end - first, a.block_size - first % a.block_size);
    const T* row = key_row<T>(a, shared, sequence, head, first);
    if (!row) return false;
    function(row, first, count);
    first += count;
  }
  return true;
}

inline void zero_output(const Attention& a, int64_t n) {
  for (int64_t head = 0; head < a.heads; ++head) {
    const int64_t at = n * a.out.stride[0] + head * a.out.stride[1];
    std::memset(a.out.data + at * size_of(a.out.dtype), 0, a.size * size_of(a.out.dtype));
  }
}

// A query position must lie in the block table; a row that does not is a fault, and is skipped.
inline bool readable(const Attention& a, Shared& shared, int64_t position) {
  if (position < a.table.shape[1] * a.block_size) return true;
  shared.fail(Fault::kPosition, position);
  return false;
}

inline void plan_rows_path(const Attention& a, Shared& shared) {
  int32_t partials = 0;
  for (int64_t n = 0; n < a.tokens; ++n) {
    const int64_t position = a.position(n);
    if (position < 0 || !readable(a, shared, position)) {
      zero_output(a, n);
      continue;
    }
    const int64_t first_part = a.first_key(position) / kPartKeys;
    const int32_t parts = static_cast<int32_t>(position / kPartKeys - first_part + 1);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      for (int32_t part = 0; part < parts; ++part) {
        shared.items.push_back({static_cast<int32_t>(n), static_cast<int32_t>(head), part, parts,
                                partials, static_cast<int32_t>(first_part), 1});
      }
      partials += parts;
    }
  }
  shared.partials.take<float>(static_cast<size_t>(partials * a.partial_floats() + 1));
  if (shared.finished_size < static_cast<size_t>(partials)) {
    shared.finished = std::make_unique<std::atomic<int>[]>(partials);
    shared.finished_size = partials;
  }
  for (int32_t i = 0; i < partials; ++i) shared.finished[i].store(0, std::memory_order_relaxed);
}

inline void plan_block_path(const Attention& a, Shared& shared) {
  const int64_t step = a.block_queries();
  for (int64_t row = 0; row < a.batch; ++row) {
    // Later queries see more keys: the largest pieces of work come first.
    for (int64_t first = (a.queries - 1) / step * step; first >= 0; first -= step) {
      const int64_t count = std::min(step, a.queries - first);
      for (int64_t head = 0; head < a.kv_heads; ++head) {
        shared.items.push_back({static_cast<int32_t>(row), static_cast<int32_t>(head), 0, 1, 0,
                                static_cast<int32_t>(first), static_cast<int32_t>(count)});
      }
    }
  }
}

inline int64_t attention_plan(const Call& call, Shared& shared, int threads) {
  const Attention a(call);
  shared.items.clear();
  shared.threads = threads;
  if (a.by_block()) {
    plan_block_path(a, shared);
  } else {
    plan_rows_path(a, shared);
  }
  return static_cast<int64_t>(shared.items.size());
}

// Scores of 16 keys as attention wants them: scaled, capped, with the linear bias.
RBLN_INLINE Vec adjust_scores(const Attention& a, Vec scores, float slope, int64_t first_key,
                              int64_t position) {
  Vec s = scores * a.call.scale;
  if (a.call.soft_cap > 0) s = a.call.soft_cap * vtanh(s / a.call.soft_cap);
  if (slope != 0) {
    const Vec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    s += slope * (lane + static_cast<float>(first_key - position));
  }
  return s;
}

// Writes o / l for one head, with the sink's share when there is one (Xiao et al., StreamingLLM).
template <class T>
RBLN_INLINE void finish_head(const Attention& a, int64_t n, int64_t head, float most, float total,
                             const float* o) {
  float factor = 1.0f;
  if (a.sinks.present) {
    const float sink = sink_of<T>(a, head);
    const float top = std::max(most, sink);
    factor = std::exp(most - top);
    total = total * factor + std::exp(sink - top);
  }
  factor /= total;
  T* out = a.out.as<T>() + n * a.out.stride[0] + head * a.out.stride[1];
  for (int64_t i = 0; i < a.size; i += kLanes) store(out + i, load(o + i) * factor);
}

}  // namespace RBLN_ISA
}  // namespace rbln
