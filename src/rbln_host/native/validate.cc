// SPDX-License-Identifier: Apache-2.0
// What each operator demands of its operands. Nothing that passes here makes a kernel read or write
// outside the operands' memory; indices held in data are checked while a program runs.
#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "expression.h"
#include "program.h"

namespace rbln {
namespace {

class Checker {
 public:
  explicit Checker(const CommandSpec& spec) : spec_(spec) {}

  void that(bool condition, const std::string& why) const {
    if (!condition) throw std::invalid_argument(spec_.op + ": " + why);
  }

  void count(size_t expected) const {
    that(spec_.tensors.size() == expected, "it takes " + std::to_string(expected) +
                                               " tensors, not " +
                                               std::to_string(spec_.tensors.size()));
  }

  double number(const std::string& name, double least, double most) const {
    const auto found = spec_.numbers.find(name);
    that(found != spec_.numbers.end(), "the number " + name + " is missing");
    that(found->second >= least && found->second <= most,
         "the number " + name + " is out of range");
    return found->second;
  }

  int64_t integer(const std::string& name) const {
    const double value = number(name, 0, 9e15);
    that(value == std::floor(value), "the number " + name + " is not whole");
    return static_cast<int64_t>(value);
  }

  bool flag(const std::string& name) const { return number(name, 0, 1) != 0; }

 private:
  const CommandSpec& spec_;
};

constexpr int64_t kMost = int64_t{1} << 46;  // of elements, and of elements stepped over

Operand operand_of(const Checker& check, const TensorSpec& t) {
  check.that(!t.shape.empty() && t.shape.size() <= kMaxAxes, "a tensor has 1 to 5 axes");
  check.that(t.shape.size() == t.strides.size(), "a tensor needs a stride for each axis");
  __int128 count = 1, reach = 0;
  Operand operand;
  operand.present = true;
  operand.dtype = t.dtype;
  operand.ndim = static_cast<int>(t.shape.size());
  for (int axis = 0; axis < operand.ndim; ++axis) {
    check.that(t.shape[axis] >= 0 && t.shape[axis] <= kMost, "an axis has an impossible size");
    check.that(t.strides[axis] >= 0 && t.strides[axis] <= kMost, "a stride is impossible");
    operand.shape[axis] = t.shape[axis];
    operand.stride[axis] = t.strides[axis];
    count *= std::max<int64_t>(1, t.shape[axis]);
    reach += static_cast<__int128>(std::max<int64_t>(1, t.shape[axis]) - 1) * t.strides[axis];
    check.that(count <= kMost && reach <= kMost, "a tensor is too large");
  }
  return operand;
}

bool same_shape(const Operand& a, const Operand& b) {
  if (a.ndim != b.ndim) return false;
  for (int axis = 0; axis < a.ndim; ++axis) {
    if (a.shape[axis] != b.shape[axis]) return false;
  }
  return true;
}

bool is_contiguous(const Operand& t) {
  int64_t expected = 1;
  for (int axis = t.ndim - 1; axis >= 0; --axis) {
    if (t.shape[axis] != 1 && t.stride[axis] != expected) return false;
    expected *= t.shape[axis];
  }
  return true;
}

// ---- conditions many operators share

void need_axes(const Checker& c, const Operand& t, int ndim, const char* name) {
  c.that(t.present, std::string(name) + " is missing");
  c.that(t.ndim == ndim, std::string(name) + " has " + std::to_string(t.ndim) + " axes, not " +
                             std::to_string(ndim));
}

void need_rows(const Checker& c, const Operand& t, DType dtype, const char* name) {
  c.that(t.present, std::string(name) + " is missing");
  c.that(is_float(dtype) && t.dtype == dtype, std::string(name) + " has the wrong dtype");
  c.that(t.last() <= 1 || t.stride[t.ndim - 1] == 1,
         std::string(name) + ": elements of a row must follow each other");
}

void need_vector(const Checker& c, const Operand& t, DType dtype, int64_t size, const char* name) {
  if (!t.present) return;
  need_rows(c, t, dtype, name);
  c.that(t.ndim == 1 && t.shape[0] == size, std::string(name) + " has the wrong size");
}

void need_indices(const Checker& c, const Operand& t, int64_t size, const char* name) {
  need_axes(c, t, 1, name);
  c.that(!is_float(t.dtype), std::string(name) + " must hold integers");
  c.that(t.shape[0] == size, std::string(name) + " has the wrong size");
}

// What is written lies in memory once, so that tasks do not write over each other and no more is
// written than there is memory. From the innermost axis out, each must step over all it contains.
void need_own_memory(const Checker& c, const Operand& t, const char* name) {
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride and size
  for (int axis = 0; axis < t.ndim; ++axis) {
    if (t.shape[axis] == 0) return;
    if (t.shape[axis] > 1) axes.emplace_back(t.stride[axis], t.shape[axis]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : axes) {
    c.that(stride > reach, std::string(name) + " is written and some of its elements share memory");
    reach += (size - 1) * stride;
  }
}

void need_packed(const Checker& c, const Operand& w, DType dtype, int64_t columns, int64_t k) {
  c.that(w.present && w.dtype == dtype && is_contiguous(w), "the weight is not packed");
  const int64_t groups = (columns + 15) / 16;
  const bool pairs = dtype == DType::kBFloat16;
  const bool fits =
      pairs ? w.ndim == 4 && w.shape[1] == (k + 1) / 2 && w.shape[2] == 16 && w.shape[3] == 2
            : w.ndim == 3 && w.shape[1] == k && w.shape[2] == 16;
  c.that(fits && w.shape[0] == groups, "the packed weight does not have the input's width");
}

// ---- one function per operator

void check_linear(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[call.count - 1];
  need_axes(c, x, 2, "input");
  need_axes(c, out, 2, "output");
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(x.shape[1] > 0 && out.shape[1] > 0, "a linear without columns");
  need_packed(c, call[1], x.dtype, out.shape[1], x.shape[1]);
  need_vector(c, call[2], x.dtype, out.shape[1], "bias");
  if (!call[3].present) return;
  need_rows(c, call[3], x.dtype, "residual");
  c.that(same_shape(call[3], out), "residual and output have different shapes");
}

void check_gated_linear(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[call.count - 1];
  need_axes(c, x, 2, "input");
  need_axes(c, out, 2, "output");
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(out.shape[1] > 0 && out.shape[1] % 16 == 0, "columns must be a multiple of 16");
  c.that(x.shape[1] > 0, "a linear without columns");
  need_packed(c, call[1], x.dtype, 2 * out.shape[1], x.shape[1]);
  need_vector(c, call[2], x.dtype, 2 * out.shape[1], "bias");
}

// ---- adapters

// Slots and ranks of the rows, and that each part's module has a rank.
void need_adapters(const Checker& c, const Call& call, int first, int64_t rows) {
  const Operand &slots = call[first], &ranks = call[first + 1];
  need_indices(c, slots, rows, "slots");
  need_axes(c, ranks, 2, "ranks");
  c.that(!is_float(ranks.dtype), "ranks must hold integers");
  for (int64_t part = 0; part < call.parts; ++part) {
    c.that(call.modules[part] < ranks.shape[0], "a part's module has no ranks");
  }
}

void need_shrunk(const Checker& c, const Operand& t, int64_t rows, int64_t columns) {
  need_axes(c, t, 2, "shrunk");
  need_rows(c, t, DType::kFloat32, "shrunk");
  c.that(t.shape[0] == rows && t.shape[1] == columns, "shrunk has the wrong size");
}

void check_lora_shrink(const Checker& c, Call& call) {
  c.that(call.count == call.parts + 4, "it takes an A for each part");
  const Operand &x = call[0], &a = call[3], &out = call[call.count - 1];
  need_axes(c, x, 2, "input");
  need_rows(c, x, x.dtype, "input");
  need_adapters(c, call, 1, x.shape[0]);
  for (int64_t part = 0; part < call.parts; ++part) {
    const Operand& each = call[3 + static_cast<int>(part)];
    need_axes(c, each, 3, "A");
    c.that(each.dtype == x.dtype && is_contiguous(each) && same_shape(each, a),
           "each A must be contiguous, of the input's dtype and of one shape");
  }
  c.that(a.shape[0] == call[2].shape[1] && a.shape[1] > 0 && a.shape[2] == x.shape[1],
         "A needs a matrix of the input's width for each slot");
  need_shrunk(c, out, x.shape[0], call.parts * a.shape[1]);
  need_own_memory(c, out, "output");
}

// What a linear of `columns` columns takes of adapters, before its output.
void need_expansion(const Checker& c, const Call& call, int own, int64_t columns) {
  c.that(call.count == own + 3 + call.parts + 1, "it takes a B for each part");
  const int64_t rows = call[0].shape[0];
  need_adapters(c, call, own + 1, rows);
  const int64_t slots = call[own + 2].shape[1];
  need_axes(c, call[own + 3], 4, "B");
  const int64_t rank = call[own + 3].shape[2];
  c.that(rank > 0, "B has no ranks");
  need_shrunk(c, call[own], rows, call.parts * rank);
  for (int64_t part = 0; part < call.parts; ++part) {
    const Operand& b = call[own + 3 + static_cast<int>(part)];
    const int64_t start = call.starts[part], size = call.sizes[part];
    c.that(size > 0 && size <= columns && start <= columns - size, "a part is outside the columns");
    need_axes(c, b, 4, "B");
    c.that(b.dtype == call[0].dtype && is_contiguous(b) && b.shape[0] == slots &&
               b.shape[1] == (size + 15) / 16 && b.shape[2] == rank && b.shape[3] == 16,
           "B needs groups of 16 columns for each slot");
  }
}

void check_lora_linear(const Checker& c, Call& call) {
  check_linear(c, call);
  need_expansion(c, call, 4, call[call.count - 1].shape[1]);
}

void check_lora_gated_linear(const Checker& c, Call& call) {
  check_gated_linear(c, call);
  need_expansion(c, call, 3, 2 * call[call.count - 1].shape[1]);
}

void check_gated_activation(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[1];
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(x.last() == 2 * out.last() && x.ndim == out.ndim && x.rows() == out.rows(),
         "the input must be twice as wide as the output");
}

void check_rms_norm(const Checker& c, Call& call) {
  const bool adds = call.op == Op::kAddRmsNorm;
  const Operand &x = call[0], &out = call[adds ? 3 : 2];
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(x, out) && x.last() > 0, "input and output have different shapes");
  const Operand& weight = call[adds ? 2 : 1];
  // Gemma's 1 + weight is kept in fp32.
  need_vector(c, weight, weight.dtype == DType::kFloat32 ? weight.dtype : x.dtype, x.last(),
              "weight");
  c.that(call.variance_size <= x.last(), "variance_size is larger than a row");
  if (!adds) return;
  need_rows(c, call[1], x.dtype, "residual");
  need_rows(c, call[4], x.dtype, "sum");
  need_own_memory(c, call[4], "sum");
  c.that(same_shape(call[1], x) && same_shape(call[4], x), "residual and input differ in shape");
}

void check_layer_norm(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[3];
  need_rows(c, x, x.dtype, "input");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(x, out) && x.last() > 0, "input and output have different shapes");
  need_vector(c, call[1], x.dtype, x.last(), "weight");
  need_vector(c, call[2], x.dtype, x.last(), "bias");
}

void need_heads(const Checker& c, const Operand& t, DType dtype, const char* name) {
  need_axes(c, t, 3, name);
  need_rows(c, t, dtype, name);
}

void need_cos_sin(const Checker& c, const Operand& table, DType dtype, int64_t head_size) {
  need_axes(c, table, 2, "cos/sin table");
  need_rows(c, table, dtype, "cos/sin table");
  c.that(table.shape[1] <= head_size && table.shape[1] % 2 == 0,
         "the rotary size is odd or larger than the head");
}

void need_pool(const Checker& c, const Operand& kv, DType dtype, int64_t heads, int64_t head_size) {
  need_axes(c, kv, 4, "KV pool");
  need_rows(c, kv, dtype, "KV pool");
  need_own_memory(c, kv, "KV pool");
  c.that(kv.shape[1] == heads && kv.shape[3] == 2 * head_size,
         "the KV pool has other heads than the keys");
  c.that(kv.shape[0] > 0 && kv.shape[2] > 0, "the KV pool is empty");
}

void check_rotary(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[3];
  need_heads(c, x, x.dtype, "input");
  need_heads(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(x, out), "input and output have different shapes");
  need_indices(c, call[1], x.shape[0], "positions");
  need_cos_sin(c, call[2], x.dtype, x.shape[2]);
}

void check_keys_and_values(const Checker& c, const Operand& key, const Operand& value,
                           const Operand& kv) {
  need_heads(c, key, key.dtype, "key");
  need_heads(c, value, key.dtype, "value");
  c.that(same_shape(key, value), "keys and values have different shapes");
  need_pool(c, kv, key.dtype, key.shape[1], key.shape[2]);
}

void check_rotary_write_kv(const Checker& c, Call& call) {
  const Operand &query = call[0], &key = call[1], &out = call[7];
  check_keys_and_values(c, key, call[2], call[5]);
  need_heads(c, query, key.dtype, "query");
  need_heads(c, out, key.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(query, out), "query and output have different shapes");
  c.that(query.shape[0] == key.shape[0] && query.shape[2] == key.shape[2],
         "queries and keys differ in tokens or head size");
  need_indices(c, call[3], key.shape[0], "positions");
  need_cos_sin(c, call[4], key.dtype, key.shape[2]);
  need_indices(c, call[6], key.shape[0], "slots");
}

void check_write_kv(const Checker& c, Call& call) {
  check_keys_and_values(c, call[0], call[1], call[2]);
  need_indices(c, call[3], call[0].shape[0], "slots");
}

void check_attention(const Checker& c, Call& call) {
  const Operand &query = call[0], &kv = call[1], &table = call[2], &sinks = call[4],
                &alibi = call[5], &out = call[6];
  need_heads(c, query, query.dtype, "query");
  need_heads(c, out, query.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(query, out), "query and output have different shapes");
  need_axes(c, kv, 4, "KV pool");
  c.that(kv.shape[1] > 0 && query.shape[1] % kv.shape[1] == 0 && query.shape[1] > 0,
         "query heads must be a multiple of KV heads");
  need_pool(c, kv, query.dtype, kv.shape[1], query.shape[2]);
  c.that(query.shape[2] > 0 && query.shape[2] % 16 == 0, "the head size must be a multiple of 16");
  need_axes(c, table, 2, "block table");
  c.that(table.dtype == DType::kInt32, "the block table must be int32");
  c.that(table.shape[0] > 0 && query.shape[0] % table.shape[0] == 0,
         "tokens must be a multiple of sequences");
  c.that(table.shape[1] <= 1 || table.stride[1] > 0, "the block table is broadcast");
  c.that(table.shape[1] <= INT32_MAX / kv.shape[2], "the context is longer than 2^31 positions");
  need_indices(c, call[3], query.shape[0], "positions");
  if (sinks.present) {
    c.that(sinks.ndim == 1 && sinks.shape[0] == query.shape[1] && sinks.stride[0] == 1 &&
               (sinks.dtype == DType::kFloat32 || sinks.dtype == query.dtype),
           "sinks need one number per head");
  }
  need_vector(c, alibi, DType::kFloat32, query.shape[1], "alibi slopes");
}

void check_encoder_attention(const Checker& c, Call& call) {
  const Operand &query = call[0], &key = call[1], &value = call[2], &out = call[4];
  need_heads(c, query, query.dtype, "query");
  need_heads(c, key, query.dtype, "key");
  need_heads(c, value, query.dtype, "value");
  need_heads(c, out, query.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(same_shape(query, out), "query and output have different shapes");
  c.that(same_shape(key, value), "keys and values have different shapes");
  c.that(key.shape[0] == query.shape[0] && key.shape[2] == query.shape[2],
         "queries and keys differ in tokens or head size");
  c.that(key.shape[1] > 0 && query.shape[1] % key.shape[1] == 0 && query.shape[1] > 0,
         "query heads must be a multiple of KV heads");
  c.that(query.shape[2] > 0 && query.shape[2] % 16 == 0, "the head size must be a multiple of 16");
  c.that(query.shape[0] <= INT32_MAX, "there are more than 2^31 tokens");
  need_axes(c, call[3], 1, "row starts");
  c.that(!is_float(call[3].dtype), "row starts must hold integers");
  c.that(call[3].shape[0] > 0, "row starts need the end of the last row");
}

void check_embedding(const Checker& c, Call& call) {
  const Operand &table = call[0], &ids = call[1], &out = call[2];
  need_axes(c, out, 2, "output");
  need_rows(c, out, table.dtype, "output");
  need_own_memory(c, out, "output");
  need_indices(c, ids, out.shape[0], "ids");
  c.that(call.rows > 0 && call.width == out.shape[1], "the output has another width");
  if (call.packed) return need_packed(c, table, table.dtype, call.rows, call.width);
  need_axes(c, table, 2, "table");
  need_rows(c, table, table.dtype, "table");
  c.that(table.shape[0] == call.rows && table.shape[1] == call.width, "the table has another size");
}

void check_elementwise(const Checker& c, Call& call) {
  const Operand& out = call[call.count - 1];
  need_own_memory(c, out, "output");
  for (int i = 0; i < call.count; ++i) {
    c.that(call[i].present && is_float(call[i].dtype), "operands must be floating point");
    c.that(same_shape(call[i], out), "operands must be expanded to the output's shape");
  }
  for (const ExpressionStep& step : call.expression) {
    c.that(step.step != Step::kInput || step.input < call.count - 1, "an input does not exist");
  }
}

void check_copy(const Checker& c, Call& call) {
  c.that(call[0].present && call[1].present && same_shape(call[0], call[1]),
         "source and target have different shapes");
  need_own_memory(c, call[1], "target");
}

void check_argmax(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[1];
  need_rows(c, x, x.dtype, "input");
  c.that(x.ndim == 2 && x.shape[1] > 0, "input needs rows of at least one element");
  need_axes(c, out, 1, "output");
  c.that(out.dtype == DType::kInt64 && out.shape[0] == x.shape[0],
         "output must be int64, one a row");
  need_own_memory(c, out, "output");
}

void need_logits(const Checker& c, const Operand& logits) {
  need_axes(c, logits, 2, "logits");
  need_rows(c, logits, logits.dtype, "logits");
  c.that(logits.shape[1] > 0 && logits.shape[1] < INT32_MAX, "the vocabulary has no possible size");
}

void need_bitmask(const Checker& c, const Operand& mask, const Operand& logits) {
  need_axes(c, mask, 2, "bitmask");
  c.that(mask.dtype == DType::kInt32 && (mask.shape[1] <= 1 || mask.stride[1] == 1),
         "the bitmask must be int32, words of a row next to each other");
  c.that(mask.shape[0] == logits.shape[0] && mask.shape[1] == (logits.shape[1] + 31) / 32,
         "the bitmask needs a row for each row of logits and a bit for each token");
}

void check_mask_tokens(const Checker& c, Call& call) {
  need_logits(c, call[1]);
  need_own_memory(c, call[1], "logits");
  need_bitmask(c, call[0], call[1]);
}

void need_one_a_row(const Checker& c, const Operand& t, DType dtype, int64_t rows,
                    const char* name) {
  need_axes(c, t, 1, name);
  c.that(t.dtype == dtype && t.shape[0] == rows,
         std::string(name) + " has the wrong dtype or size");
}

void check_sample(const Checker& c, Call& call) {
  need_logits(c, call[0]);
  const int64_t rows = call[0].shape[0];
  need_one_a_row(c, call[1], DType::kFloat32, rows, "temperature");
  need_one_a_row(c, call[2], DType::kInt32, rows, "top_k");
  need_one_a_row(c, call[3], DType::kFloat32, rows, "top_p");
  need_one_a_row(c, call[4], DType::kInt64, rows, "seed");
  need_one_a_row(c, call[5], DType::kInt64, rows, "position");
  if (call[6].present) need_bitmask(c, call[6], call[0]);
  need_one_a_row(c, call[7], DType::kInt64, rows, "token");
  need_one_a_row(c, call[8], DType::kFloat32, rows, "threshold");
  need_own_memory(c, call[7], "token");
  need_own_memory(c, call[8], "threshold");
}

// ---- mixtures of experts

// The weights of each expert follow each other, packed as one.
void need_packed_experts(const Checker& c, const Operand& w, DType dtype, int64_t columns,
                         int64_t k) {
  need_axes(c, w, dtype == DType::kBFloat16 ? 5 : 4, "weight");
  c.that(w.shape[0] > 0 && w.shape[0] < INT32_MAX, "there is no possible number of experts");
  c.that(is_contiguous(w), "the weight is not packed");
  Operand one = w;
  one.ndim = w.ndim - 1;
  for (int axis = 0; axis < one.ndim; ++axis) {
    one.shape[axis] = w.shape[axis + 1];
    one.stride[axis] = w.stride[axis + 1];
  }
  need_packed(c, one, dtype, columns, k);
}

void need_expert_bias(const Checker& c, const Operand& bias, DType dtype, int64_t experts,
                      int64_t columns) {
  if (!bias.present) return;
  need_axes(c, bias, 2, "bias");
  need_rows(c, bias, dtype, "bias");
  c.that(bias.shape[0] == experts && bias.shape[1] == columns, "bias has the wrong size");
}

// A number of an expert for each token and choice.
void need_experts(const Checker& c, const Operand& experts, int64_t tokens, int64_t choices) {
  need_axes(c, experts, 2, "experts");
  c.that(!is_float(experts.dtype), "experts must hold integers");
  c.that(experts.shape[0] == tokens && experts.shape[1] == choices, "experts has the wrong size");
  c.that(choices > 0 && tokens < INT32_MAX / choices, "there are too many rows");
}

void check_route(const Checker& c, Call& call) {
  const Operand &logits = call[0], &weights = call[1], &experts = call[2];
  need_axes(c, logits, 2, "logits");
  need_rows(c, logits, logits.dtype, "logits");
  need_axes(c, weights, 2, "weights");
  need_rows(c, weights, logits.dtype, "weights");
  need_own_memory(c, weights, "weights");
  c.that(weights.shape[0] == logits.shape[0], "logits and weights have different rows");
  c.that(weights.shape[1] <= logits.shape[1], "more experts are chosen than there are");
  need_experts(c, experts, weights.shape[0], weights.shape[1]);
  c.that(experts.dtype == DType::kInt64, "experts must be int64");
  need_own_memory(c, experts, "experts");
}

void check_gated_experts(const Checker& c, Call& call) {
  const Operand &x = call[0], &out = call[4];
  need_axes(c, x, 2, "input");
  need_rows(c, x, x.dtype, "input");
  need_axes(c, out, 3, "output");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(out.shape[2] > 0 && out.shape[2] % 16 == 0, "columns must be a multiple of 16");
  c.that(x.shape[1] > 0, "experts without columns");
  need_packed_experts(c, call[1], x.dtype, 2 * out.shape[2], x.shape[1]);
  need_expert_bias(c, call[2], x.dtype, call[1].shape[0], 2 * out.shape[2]);
  need_experts(c, call[3], out.shape[0], out.shape[1]);
}

void check_combine_experts(const Checker& c, Call& call) {
  const Operand &x = call[0], &weights = call[4], &out = call[5];
  need_axes(c, x, 3, "input");
  need_rows(c, x, x.dtype, "input");
  need_axes(c, out, 2, "output");
  need_rows(c, out, x.dtype, "output");
  need_own_memory(c, out, "output");
  c.that(out.shape[0] == x.shape[0], "input and output have different rows");
  c.that(x.shape[2] > 0 && out.shape[1] > 0, "experts without columns");
  need_packed_experts(c, call[1], x.dtype, out.shape[1], x.shape[2]);
  need_expert_bias(c, call[2], x.dtype, call[1].shape[0], out.shape[1]);
  need_experts(c, call[3], x.shape[0], x.shape[1]);
  need_axes(c, weights, 2, "weights");
  need_rows(c, weights, x.dtype, "weights");
  c.that(weights.shape[0] == x.shape[0] && weights.shape[1] == x.shape[1],
         "weights has the wrong size");
}

struct OperatorRule {
  Op op;
  int tensors;  // 0: any number
  void (*check)(const Checker&, Call&);
};

const std::map<std::string, OperatorRule>& rules() {
  static const std::map<std::string, OperatorRule> table = {
      {"linear", {Op::kLinear, 5, check_linear}},
      {"gated_linear", {Op::kGatedLinear, 4, check_gated_linear}},
      {"gated_activation", {Op::kGatedActivation, 2, check_gated_activation}},
      {"rms_norm", {Op::kRmsNorm, 3, check_rms_norm}},
      {"add_rms_norm", {Op::kAddRmsNorm, 5, check_rms_norm}},
      {"layer_norm", {Op::kLayerNorm, 4, check_layer_norm}},
      {"rotary", {Op::kRotary, 4, check_rotary}},
      {"rotary_write_kv", {Op::kRotaryWriteKv, 8, check_rotary_write_kv}},
      {"write_kv", {Op::kWriteKv, 4, check_write_kv}},
      {"paged_attention", {Op::kPagedAttention, 7, check_attention}},
      {"encoder_attention", {Op::kEncoderAttention, 5, check_encoder_attention}},
      {"embedding", {Op::kEmbedding, 3, check_embedding}},
      {"elementwise", {Op::kElementwise, 0, check_elementwise}},
      {"copy", {Op::kCopy, 2, check_copy}},
      {"argmax", {Op::kArgmax, 2, check_argmax}},
      {"mask_tokens", {Op::kMaskTokens, 2, check_mask_tokens}},
      {"sample", {Op::kSample, 9, check_sample}},
      {"route", {Op::kRoute, 3, check_route}},
      {"gated_experts", {Op::kGatedExperts, 5, check_gated_experts}},
      {"combine_experts", {Op::kCombineExperts, 6, check_combine_experts}},
      {"lora_shrink", {Op::kLoraShrink, 0, check_lora_shrink}},
      {"lora_linear", {Op::kLoraLinear, 0, check_lora_linear}},
      {"lora_gated_linear", {Op::kLoraGatedLinear, 0, check_lora_gated_linear}},
  };
  return table;
}

// Of each part one number of this name.
void read_parts(const Checker& c, const Call& call, const std::string& name, int64_t* numbers) {
  for (int64_t part = 0; part < call.parts; ++part) {
    numbers[part] = c.integer(name + "." + std::to_string(part));
  }
}

void read_numbers(const Checker& c, Call& call) {
  switch (call.op) {
    case Op::kLoraLinear:
    case Op::kLoraGatedLinear:
    case Op::kLoraShrink:
      call.parts = static_cast<int64_t>(c.number("parts", 1, kMaxParts));
      read_parts(c, call, "modules", call.modules);
      if (call.op == Op::kLoraShrink) break;
      read_parts(c, call, "starts", call.starts);
      read_parts(c, call, "sizes", call.sizes);
      break;
    case Op::kRmsNorm:
    case Op::kAddRmsNorm:
      call.variance_size = c.integer("variance_size");
      [[fallthrough]];
    case Op::kLayerNorm:
      call.epsilon = static_cast<float>(c.number("epsilon", 0, 1e30));
      break;
    case Op::kRotary:
    case Op::kRotaryWriteKv:
      call.neox = c.flag("neox");
      break;
    case Op::kPagedAttention:
      call.scale = static_cast<float>(c.number("scale", -1e30, 1e30));
      call.soft_cap = static_cast<float>(c.number("soft_cap", 0, 1e30));
      call.window = c.integer("window");
      break;
    case Op::kEncoderAttention:
      call.scale = static_cast<float>(c.number("scale", -1e30, 1e30));
      break;
    case Op::kEmbedding:
      call.packed = c.flag("packed");
      call.rows = c.integer("rows");
      call.width = c.integer("width");
      break;
    case Op::kRoute:
      call.renormalise = c.flag("renormalise");
      break;
    case Op::kGatedExperts:
      call.limit = static_cast<float>(c.number("limit", 0, 1e30));
      call.offset = static_cast<float>(c.number("offset", -1e30, 1e30));
      break;
    default:
      break;
  }
}

bool has_activation(Op op) {
  return op == Op::kLinear || op == Op::kGatedLinear || op == Op::kGatedActivation ||
         op == Op::kGatedExperts || op == Op::kLoraLinear || op == Op::kLoraGatedLinear;
}

}  // namespace

Call check(const CommandSpec& spec) {
  const Checker checker(spec);
  const auto found = rules().find(spec.op);
  checker.that(found != rules().end(), "there is no such operator");
  const OperatorRule& rule = found->second;
  if (rule.tensors) checker.count(rule.tensors);
  checker.that(!spec.tensors.empty() && spec.tensors.size() <= kMaxOperands,
               "it has no tensors or too many");
  Call call;
  call.op = rule.op;
  call.count = static_cast<int>(spec.tensors.size());
  for (int i = 0; i < call.count; ++i) {
    if (spec.tensors[i]) call.operands[i] = operand_of(checker, *spec.tensors[i]);
  }
  checker.that(call[0].present, "its first tensor is missing");
  call.by_token = spec.by_token;
  read_numbers(checker, call);
  if (has_activation(call.op)) {
    const auto activation = parse_activation(spec.text);
    checker.that(activation.has_value(), "unknown activation '" + spec.text + "'");
    call.activation = *activation;
  }
  if (call.op == Op::kElementwise) call.expression = parse_expression(spec.text);
  rule.check(checker, call);
  return call;
}

}  // namespace rbln
