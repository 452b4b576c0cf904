// SPDX-License-Identifier: Apache-2.0
// Which low-rank adapter each row has. A row without one costs nothing and gets nothing, not even a
// zero: the rest of its linear is computed as without adapters.
#pragma once

#include <algorithm>

#include "rows.h"

namespace rbln {
namespace RBLN_ISA {

// Slots and ranks of a call's rows. A slot is data: one that does not exist counts as none here,
// and lora_shrink, which comes first, reports it.
struct AdapterRows {
  const Operand& slots;
  const Operand& ranks;

  // The slot of a row's adapter; -1 for none.
  int64_t slot(int64_t row) const {
    const int64_t slot = load_index(slots, row);
    return slot < ranks.shape[1] ? std::max<int64_t>(slot, -1) : -1;
  }
  // How many of `most` ranks the adapter in a slot has in a module.
  int64_t rank(int64_t module, int64_t slot, int64_t most) const {
    if (slot < 0) return 0;
    const int64_t at = module * ranks.stride[0] + slot * ranks.stride[1];
    const int64_t rank =
        ranks.dtype == DType::kInt64 ? ranks.as<int64_t>()[at] : ranks.as<int32_t>()[at];
    return std::clamp<int64_t>(rank, 0, most);
  }
  // The end of the rows from `row` on, before `end`, that have its slot.
  int64_t same_until(int64_t row, int64_t end) const {
    const int64_t first = slot(row);
    int64_t next = row + 1;
    while (next < end && slot(next) == first) ++next;
    return next;
  }
};

}  // namespace RBLN_ISA
}  // namespace rbln
