// SPDX-License-Identifier: Apache-2.0
// Which rules an operator's operands keep to. Nothing that passes here makes a kernel read or write
// outside the operands' memory; indices held in data are checked while a program runs.
#include <map>
#include <string>

#include "expression.h"
#include "program.h"
#include "rules/attention.h"
#include "rules/linear.h"
#include "rules/lora.h"
#include "rules/moe.h"
#include "rules/operands.h"
#include "rules/rows.h"
#include "rules/sampling.h"

namespace rbln {
namespace {

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
