// SPDX-License-Identifier: Apache-2.0
// encoder_attention: every token attends to all tokens of its own row, the earlier and the later.
//
// Rows lie one after another along the tokens, of any length, and their keys and values are
// operands like the queries: there is no pool. Items and tiles are those of attention_block.h, with
// a row's own first key at the start of its first tile, so that a row's result depends on its own
// tokens alone.
#pragma once

#include "attention_block.h"

namespace rbln {
namespace RBLN_ISA {

// A task attends with about so many pairs of a query and a key, or more: taking a task costs as
// much as some dozens of them.
constexpr int64_t kItemPairs = 2048;

// Row r has the tokens [starts[r], starts[r + 1]). An item is a block of its queries and some KV
// heads: `part` of them from `head` on. Its `slot` is its row's first token, its `parts` the row's
// length.
inline void plan_encoder_row(const Attention& a, Shared& shared, int64_t row, int64_t start,
                             int64_t length) {
  const int64_t step = a.block_queries();
  for (int64_t first = 0; first < length; first += step) {
    const int64_t count = std::min(step, length - first);
    const int64_t several = std::max<int64_t>(1, kItemPairs / (count * a.group * length));
    for (int64_t head = 0; head < a.kv_heads; head += several) {
      const int64_t heads = std::min(several, a.kv_heads - head);
      shared.items.push_back({static_cast<int32_t>(row), static_cast<int32_t>(head),
                              static_cast<int32_t>(heads), static_cast<int32_t>(length),
                              static_cast<int32_t>(start), static_cast<int32_t>(first),
                              static_cast<int32_t>(count)});
    }
  }
}

inline int64_t encoder_attention_plan(const Call& call, Shared& shared, int threads) {
  const Attention a(call, Attention::Encoder{});
  shared.items.clear();
  shared.threads = threads;
  int64_t start = a.position(0);
  if (start < 0 || start > a.tokens) {
    shared.fail(Fault::kRow, start);
    return 0;
  }
  for (int64_t n = 0; n < start; ++n) zero_output(a, n);
  for (int64_t row = 0; row < a.batch; ++row) {
    const int64_t end = a.position(row + 1);
    if (end < start || end > a.tokens) {
      shared.fail(Fault::kRow, end);
      break;
    }
    plan_encoder_row(a, shared, row, start, end - start);
    start = end;
  }
  // Tokens of no row. Where padding is left out of a run, nobody reads them.
  for (int64_t n = start; n < in_use(call, shared, a.tokens); ++n) zero_output(a, n);
  return static_cast<int64_t>(shared.items.size());
}

// Packs the keys and values of tokens [first, first + count) of one KV head.
template <class T>
void pack_tokens(const Attention& a, int64_t head, int64_t first, int64_t count,
                 const BlockScratch<T>& s) {
  const Operand& value = a.call[2];
  const T* keys = a.kv.as<T>() + first * a.kv.stride[0] + head * a.kv.stride[1];
  const T* values = value.as<T>() + first * value.stride[0] + head * value.stride[1];
  for (int64_t j = 0; j < count; j += 16) {
    const T* sixteen[16] = {};
    for (int64_t i = 0; i < std::min<int64_t>(16, count - j); ++i) {
      sixteen[i] = keys + (j + i) * a.kv.stride[0];
    }
    pack_keys(sixteen, a.size, s.keys + j / 16 * group_elements<T>(a.size));
  }
  for (int64_t j = 0; j < count; j += 2) {
    const T* odd = j + 1 < count ? values + (j + 1) * value.stride[0] : nullptr;
    pack_value_pair(values + j * value.stride[0], odd, a.size, j, s.values);
  }
}

// The queries of a block as the micro-kernel wants them, query-major.
template <class T>
void copy_queries(const Attention& a, int64_t head, int64_t first_token, int64_t queries,
                  const BlockScratch<T>& s) {
  for (int64_t q = 0; q < queries; ++q) {
    const T* source = a.query.as<T>() + (first_token + q) * a.query.stride[0] +
                      head * a.group * a.query.stride[1];
    for (int64_t g = 0; g < a.group; ++g) {
      int64_t unused;
      const Row<T>* row = as_rows(source + g * a.query.stride[1], a.size, 1, a.size, s.o, &unused);
      Row<T>* target = s.query + (q * a.group + g) * a.size;
      std::memcpy(target, row, sizeof(*target) * a.size);
    }
  }
}

// Keys [first, first + count) of the row that starts at token `start` and has `length` tokens.
template <class T>
void attend_encoder_tile(const Attention& a, int64_t head, int64_t start, int64_t length,
                         int64_t first, int64_t rows, const BlockScratch<T>& s) {
  const int64_t count = std::min(kKeyTile, length - first);
  pack_tokens<T>(a, head, start + first, count, s);
  multiply<T>(s.query, a.size, rows, s.keys, group_elements<T>(a.size), (count + 15) / 16, a.size,
              s.score, kKeyTile, false);
  for (int64_t row = 0; row < rows; ++row) {
    if (a.call.scale > 0) {
      soften_row<T, kShortWeights<T>>(a, s, row, 0.0f, length - 1, first, count);
    } else {
      soften_row<T, false>(a, s, row, 0.0f, length - 1, first, count);
    }
  }
  multiply<T>(s.weight, kKeyTile, rows, s.values, group_elements<T>(kKeyTile), a.size / 16, count,
              s.o, a.size, first > 0);
}

template <class T>
void attend_encoder_block(const Attention& a, const AttentionItem& item, std::byte* scratch) {
  BlockScratch<T> s;
  s.lay_out(a, scratch);
  const int64_t start = item.slot, length = item.parts;
  const int64_t first_token = start + item.first_query;
  const int64_t rows = item.queries * a.group;
  for (int64_t head = item.head; head < item.head + item.part; ++head) {
    copy_queries<T>(a, head, first_token, item.queries, s);
    std::fill(s.most, s.most + rows, -INFINITY);
    std::fill(s.total, s.total + rows, 0.0f);
    for (int64_t first = 0; first < length; first += kKeyTile) {
      attend_encoder_tile<T>(a, head, start, length, first, rows, s);
    }
    for (int64_t row = 0; row < rows; ++row) {
      finish_head<T>(a, first_token + row / a.group, head * a.group + row % a.group, s.most[row],
                     s.total[row], s.o + row * a.size);
    }
  }
}

}  // namespace RBLN_ISA
}  // namespace rbln
