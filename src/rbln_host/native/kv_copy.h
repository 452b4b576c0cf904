// SPDX-License-Identifier: Apache-2.0
// Copies of KV blocks: the first tokens of one block over those of another, in every layer.
#pragma once

#include <vector>

#include "pool.h"

namespace rbln {

// A layer's pool [blocks, heads, block_size, ...], contiguous; `token_bytes` is one token of a
// head.
struct KvLayer {
  std::byte* data;
  int64_t heads;
  int64_t token_bytes;
};

struct KvBlockCopy {
  int64_t source;
  int64_t target;
  int64_t tokens;
};

// Copies between blocks of layers that all have the same blocks.
class KvCopier {
 public:
  // Throws std::invalid_argument for a size that is not positive or a layer without memory.
  KvCopier(std::vector<KvLayer> layers, int64_t blocks, int64_t block_size);

  // Carries the copies out in their order, in every layer and head. Large ones use all threads.
  // Throws, before anything is copied, std::out_of_range for a block that does not exist and
  // std::invalid_argument for tokens outside 1 to block_size.
  void copy(Pool& pool, const std::vector<KvBlockCopy>& copies) const;

  // Head `index` of all heads of all layers: what one thread copies, so that order is kept.
  void copy_head(int64_t index, const std::vector<KvBlockCopy>& copies) const;

 private:
  struct Head {
    std::byte* data;  // of block 0
    int64_t block_bytes;
    int64_t token_bytes;
  };

  void check(const std::vector<KvBlockCopy>& copies) const;
  int64_t bytes(const std::vector<KvBlockCopy>& copies) const;

  std::vector<Head> heads_;
  int64_t blocks_;
  int64_t block_size_;
  int64_t token_bytes_ = 0;  // of all heads
};

}  // namespace rbln
