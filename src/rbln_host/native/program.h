// SPDX-License-Identifier: Apache-2.0
// A program: checked commands over memory regions ("bases") that are bound by address.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pool.h"

namespace rbln {

// A tensor inside base region `base`: offset in bytes, strides in elements.
struct TensorSpec {
  int base;
  int64_t offset;
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

struct CommandSpec {
  std::string op;
  std::vector<std::optional<TensorSpec>> tensors;
  std::map<std::string, double> numbers;
  std::string text;
  bool by_token = false;
};

// The call of a command, its operands' addresses not yet set. Throws std::invalid_argument, with
// the operator's name, for operands that the kernel would not take.
Call check(const CommandSpec& spec);

class Program {
 public:
  // Throws std::invalid_argument when a command is not valid or an operand leaves its base.
  Program(const std::vector<CommandSpec>& commands, std::vector<int64_t> bases,
          KernelTable kernels);

  // Places base `base` at `pointer`; `size` must not be less than what was declared.
  void bind(int base, uintptr_t pointer, int64_t size);

  // Computes the first `tokens` rows of calls by token; the others' results are undefined.
  // Throws std::out_of_range for an id, position, slot or block outside its table, std::bad_alloc
  // when there is no memory for a plan.
  void run(Pool& pool, int64_t tokens) const;

 private:
  struct Use {
    size_t call;
    int operand;
    int64_t offset;
  };

  std::vector<Call> calls_;
  std::vector<Work> work_;
  std::vector<int64_t> bases_;
  std::vector<bool> bound_;
  std::vector<std::vector<Use>> uses_;  // per base
  size_t scratch_bytes_ = 0;
};

}  // namespace rbln
