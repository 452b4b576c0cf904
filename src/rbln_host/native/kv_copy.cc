// SPDX-License-Identifier: Apache-2.0
#include "kv_copy.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace rbln {
namespace {

// Below this (half a millisecond or less) waking threads gains little, and where others use the
// cores it may cost more than the copy.
constexpr int64_t kSerialBytes = 4 << 20;
constexpr int64_t kTasksPerThread = 4;
// Of the next head, while this one is copied: short pieces else wait for memory at each start.
constexpr int64_t kPrefetchBytes = 1024;
constexpr int64_t kCacheLine = 64;

void that(bool holds, const char* problem) {
  if (!holds) throw std::invalid_argument(std::string("KV pool: ") + problem);
}

// The pool runs kernels on calls; this call is an order to copy.
struct CopyCall : Call {
  const KvCopier* copier;
  const std::vector<KvBlockCopy>* copies;
  int64_t heads;
  int64_t tasks;
};

int64_t plan(const Call& call, Shared&, int) { return static_cast<const CopyCall&>(call).tasks; }

void run(const Call& call, Shared&, int64_t task, std::byte*) {
  const auto& order = static_cast<const CopyCall&>(call);
  const int64_t end = (task + 1) * order.heads / order.tasks;
  for (int64_t head = task * order.heads / order.tasks; head < end; ++head) {
    order.copier->copy_head(head, *order.copies);
  }
}

size_t no_scratch(const Call&) { return 0; }

void prefetch(const std::byte* source, const std::byte* target, int64_t bytes) {
  for (int64_t at = 0; at < std::min(bytes, kPrefetchBytes); at += kCacheLine) {
    __builtin_prefetch(source + at, 0);
    __builtin_prefetch(target + at, 1);
  }
}

constexpr Kernel kCopyHeads = {plan, run, no_scratch};

}  // namespace

KvCopier::KvCopier(std::vector<KvLayer> layers, int64_t blocks, int64_t block_size)
    : blocks_(blocks), block_size_(block_size) {
  that(blocks > 0 && block_size > 0, "blocks and block_size must be positive");
  for (const KvLayer& layer : layers) {
    that(layer.data != nullptr, "a layer has no memory");
    that(layer.heads > 0 && layer.token_bytes > 0, "a layer's sizes must be positive");
    const int64_t head_bytes = block_size * layer.token_bytes;
    for (int64_t head = 0; head < layer.heads; ++head) {
      heads_.push_back(
          {layer.data + head * head_bytes, layer.heads * head_bytes, layer.token_bytes});
      token_bytes_ += layer.token_bytes;
    }
  }
}

void KvCopier::copy(Pool& pool, const std::vector<KvBlockCopy>& copies) const {
  check(copies);
  const auto heads = static_cast<int64_t>(heads_.size());
  if (pool.threads() == 1 || bytes(copies) <= kSerialBytes) {
    for (int64_t head = 0; head < heads; ++head) copy_head(head, copies);
    return;
  }
  CopyCall call;
  call.copier = this;
  call.copies = &copies;
  call.heads = heads;
  call.tasks = std::min(heads, pool.threads() * kTasksPerThread);
  pool.run({Work{&kCopyHeads, &call}}, 0, INT64_MAX);
}

void KvCopier::copy_head(int64_t index, const std::vector<KvBlockCopy>& copies) const {
  const Head& head = heads_[index];
  const Head& next = heads_[std::min<size_t>(index + 1, heads_.size() - 1)];
  for (const KvBlockCopy& copy : copies) {
    if (copy.source == copy.target) continue;
    prefetch(next.data + copy.source * next.block_bytes, next.data + copy.target * next.block_bytes,
             copy.tokens * next.token_bytes);
    std::memcpy(head.data + copy.target * head.block_bytes,
                head.data + copy.source * head.block_bytes, copy.tokens * head.token_bytes);
  }
}

void KvCopier::check(const std::vector<KvBlockCopy>& copies) const {
  for (const KvBlockCopy& copy : copies) {
    for (const int64_t block : {copy.source, copy.target}) {
      if (block >= 0 && block < blocks_) continue;
      throw std::out_of_range("KV copy: block " + std::to_string(block) + " is not one of the " +
                              std::to_string(blocks_) + " blocks");
    }
    if (copy.tokens >= 1 && copy.tokens <= block_size_) continue;
    throw std::invalid_argument("KV copy: " + std::to_string(copy.tokens) +
                                " tokens are not 1 to " + std::to_string(block_size_));
  }
}

int64_t KvCopier::bytes(const std::vector<KvBlockCopy>& copies) const {
  int64_t tokens = 0;
  for (const KvBlockCopy& copy : copies) tokens += copy.tokens;
  return tokens * token_bytes_;
}

}  // namespace rbln
