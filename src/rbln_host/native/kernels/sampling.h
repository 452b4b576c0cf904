// SPDX-License-Identifier: Apache-2.0
// The next token of each row: of what a bitmask allows, the largest, or a draw.
//
// One task is one row, so a token depends on its row alone. What a bitmask forbids is left out from
// the start, so a row costs as much as it has tokens to choose from.
#pragma once

#include "bitmask.h"
#include "philox.h"
#include "row_sampler.h"
#include "rows.h"

namespace rbln {
namespace RBLN_ISA {

// ---- sample: logits, temperature, top_k, top_p, seed, position, bitmask (or none), token,
// threshold

constexpr float kGreedyBelow = 1e-5f;  // temperatures; as in vLLM

inline int64_t sample_plan(const Call& call, Shared& shared, int) {
  return in_use(call, shared, call[0].shape[0]);
}

inline size_t sample_scratch(const Call& call) { return SampleScratch::bytes(call[0].last()); }

// The parameters of one row.
class SampledRow {
 public:
  SampledRow(const Call& call, int64_t row) : call_(call), row_(row) {}

  bool is_padding() const { return position() < 0; }
  bool is_greedy() const { return !(temperature() >= kGreedyBelow); }

  Parameters parameters() const {
    const uint64_t seed = call_[4].as<uint64_t>()[at(4)];
    return {temperature(), load_index(call_[2], row_), call_[3].as<float>()[at(3)],
            philox_uniform(seed, static_cast<uint64_t>(position()))};
  }

  Allowed allowed() const {
    const Operand& mask = call_[6];
    const int32_t* words = mask.present ? mask.as<int32_t>() + mask.row_offset(row_) : nullptr;
    return {words, call_[0].last()};
  }

  void write(const Drawn& drawn) const {
    call_[7].as<int64_t>()[at(7)] = drawn.token;
    call_[8].as<float>()[at(8)] = drawn.threshold;
  }

 private:
  int64_t at(int index) const { return row_ * call_[index].stride[0]; }
  float temperature() const { return call_[1].as<float>()[at(1)]; }
  int64_t position() const { return call_[5].as<int64_t>()[at(5)]; }

  const Call& call_;
  int64_t row_;
};

// The first of the largest of `count` logits, or a draw.
template <class T>
Drawn choose(const SampledRow& row, const T* logits, int64_t count, const SampleScratch& scratch) {
  if (!row.is_greedy()) return RowSampler(scratch, count).draw(logits, row.parameters());
  const int64_t at = first_largest(logits, count);
  return {at, to_float(logits[at])};
}

template <class T>
Drawn sample_row(const Call& call, int64_t index, std::byte* memory) {
  const SampledRow row(call, index);
  if (row.is_padding()) return {0, 0};
  const int64_t width = call[0].last();
  const T* logits = call[0].as<T>() + call[0].row_offset(index);
  const SampleScratch scratch(memory, width);
  const Allowed allowed = row.allowed();
  if (allowed.all()) return choose(row, logits, width, scratch);
  const int64_t count = allowed.gather(logits, scratch.work.values);
  if (count == 0) return {0, -kInfinity};
  const Drawn drawn = choose(row, scratch.work.values, count, scratch);
  return {allowed.token(drawn.token), drawn.threshold};
}

inline void sample_run(const Call& call, Shared&, int64_t task, std::byte* scratch) {
  with_float_type(call[0].dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    SampledRow(call, task).write(sample_row<T>(call, task, scratch));
  });
}

}  // namespace RBLN_ISA
}  // namespace rbln
