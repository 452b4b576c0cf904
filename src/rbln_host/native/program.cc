// SPDX-License-Identifier: Apache-2.0
#include "program.h"

#include <algorithm>
#include <new>
#include <stdexcept>

namespace rbln {
namespace {

[[noreturn]] void refuse(const std::string& op, const std::string& why) {
  throw std::invalid_argument(op + ": " + why);
}

// Bytes from the tensor's first element to one past its last.
int64_t extent(const std::string& op, const TensorSpec& t) {
  int64_t last = 0;
  for (size_t axis = 0; axis < t.shape.size(); ++axis) {
    if (t.shape[axis] == 0) return 0;
    int64_t reach;
    if (__builtin_mul_overflow(t.shape[axis] - 1, t.strides[axis], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      refuse(op, "a tensor is too large");
    }
  }
  int64_t bytes;
  if (__builtin_mul_overflow(last + 1, size_of(t.dtype), &bytes))
    refuse(op, "a tensor is too large");
  return bytes;
}

void check_inside(const std::string& op, const TensorSpec& t, const std::vector<int64_t>& bases) {
  if (t.base < 0 || static_cast<size_t>(t.base) >= bases.size()) {
    refuse(op, "base " + std::to_string(t.base) + " does not exist");
  }
  const int64_t bytes = extent(op, t);
  if (t.offset < 0 || t.offset % size_of(t.dtype) != 0 || bytes > bases[t.base] ||
      t.offset > bases[t.base] - bytes) {
    refuse(op, "a tensor of " + std::to_string(bytes) + " bytes at " + std::to_string(t.offset) +
                   " leaves base " + std::to_string(t.base) + " of " +
                   std::to_string(bases[t.base]) + " bytes");
  }
}

// Whether a call writes nothing, whatever its operands hold.
bool is_empty(const Call& call) {
  if (call.op == Op::kWriteKv || call.op == Op::kRotaryWriteKv) return call[0].shape[0] == 0;
  const Operand& out = call[call.count - 1];
  return std::find(out.shape, out.shape + out.ndim, 0) != out.shape + out.ndim;
}

std::string describe(Fault fault, int64_t value) {
  const std::string number = std::to_string(value);
  switch (fault) {
    case Fault::kId:
      return "id " + number + " is outside its table";
    case Fault::kPosition:
      return "position " + number + " is outside the position or block table";
    case Fault::kSlot:
      return "slot " + number + " is outside the KV pool";
    case Fault::kAdapter:
      return "adapter slot " + number + " does not exist";
    case Fault::kRow:
      return "row start " + number + " is before another's or outside the tokens";
    default:
      return "block " + number + " is outside the KV pool";
  }
}

}  // namespace

Program::Program(const std::vector<CommandSpec>& commands, std::vector<int64_t> bases,
                 KernelTable kernels)
    : bases_(std::move(bases)), bound_(bases_.size(), false), uses_(bases_.size()) {
  if (commands.size() >= 0xffff) refuse("program", "it has too many commands");
  calls_.reserve(commands.size());
  for (const CommandSpec& spec : commands) {
    calls_.push_back(check(spec));
    for (size_t i = 0; i < spec.tensors.size(); ++i) {
      if (!spec.tensors[i]) continue;
      check_inside(spec.op, *spec.tensors[i], bases_);
      uses_[spec.tensors[i]->base].push_back(
          {calls_.size() - 1, static_cast<int>(i), spec.tensors[i]->offset});
    }
  }
  for (const Call& call : calls_) {
    if (is_empty(call)) continue;
    const Kernel* kernel = &kernels[static_cast<int>(call.op)];
    work_.push_back({kernel, &call});
    scratch_bytes_ = std::max(scratch_bytes_, kernel->scratch(call));
  }
}

void Program::bind(int base, uintptr_t pointer, int64_t size) {
  if (base < 0 || static_cast<size_t>(base) >= bases_.size()) {
    refuse("bind", "base " + std::to_string(base) + " does not exist");
  }
  if (size < bases_[base]) {
    refuse("bind", "base " + std::to_string(base) + " needs " + std::to_string(bases_[base]) +
                       " bytes, not " + std::to_string(size));
  }
  if (pointer == 0 && bases_[base] > 0) refuse("bind", "the address is null");
  for (const Use& use : uses_[base]) {
    calls_[use.call].operands[use.operand].data =
        reinterpret_cast<std::byte*>(pointer) + use.offset;
  }
  bound_[base] = true;
}

void Program::run(Pool& pool, int64_t tokens) const {
  if (tokens < 0) refuse("run", "the number of tokens is negative");
  for (size_t base = 0; base < bound_.size(); ++base) {
    if (!bound_[base] && !uses_[base].empty()) {
      refuse("run", "base " + std::to_string(base) + " is not bound");
    }
  }
  const auto [fault, value] = pool.run(work_, scratch_bytes_, tokens);
  if (fault == Fault::kMemory) throw std::bad_alloc();
  if (fault != Fault::kNone) throw std::out_of_range(describe(fault, value));
}

}  // namespace rbln
