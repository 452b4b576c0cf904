// SPDX-License-Identifier: Apache-2.0
// All kernels for one instruction set. Compiled once for each, with RBLN_ISA set to its name.
#include "kernels.h"

#include <tuple>
#include <type_traits>

#include "kernels/attention_block.h"
#include "kernels/attention_rows.h"
#include "kernels/combine_experts.h"
#include "kernels/elementwise.h"
#include "kernels/encoder_attention.h"
#include "kernels/gated_experts.h"
#include "kernels/linear.h"
#include "kernels/lora_shrink.h"
#include "kernels/rotary.h"
#include "kernels/route.h"
#include "kernels/rows.h"
#include "kernels/sampling.h"

#define RBLN_JOIN_(a, b) a##b
#define RBLN_JOIN(a, b) RBLN_JOIN_(a, b)

namespace rbln {
namespace RBLN_ISA {
namespace {

void attention_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  const Attention a(call);
  with_float_type(a.query.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (a.by_block()) return attend_block<T>(a, shared, shared.items[task], scratch);
    attend_row<T>(a, shared, task, reinterpret_cast<float*>(scratch));
  });
}

size_t attention_scratch(const Call& call) {
  const Attention a(call);
  if (!a.by_block()) return rows_path_bytes(a);
  size_t bytes = 0;
  with_float_type(a.query.dtype, [&](auto* type) {
    bytes = BlockScratch<std::remove_pointer_t<decltype(type)>>::bytes(a);
  });
  return bytes;
}

void encoder_attention_run(const Call& call, Shared& shared, int64_t task, std::byte* scratch) {
  const Attention a(call, Attention::Encoder{});
  with_float_type(a.query.dtype, [&](auto* type) {
    attend_encoder_block<std::remove_pointer_t<decltype(type)>>(a, shared.items[task], scratch);
  });
}

size_t encoder_attention_scratch(const Call& call) {
  const Attention a(call, Attention::Encoder{});
  size_t bytes = 0;
  with_float_type(a.query.dtype, [&](auto* type) {
    bytes = BlockScratch<std::remove_pointer_t<decltype(type)>>::bytes(a);
  });
  return bytes;
}

// In the order of Op.
constexpr Kernel kTable[static_cast<int>(Op::kCount)] = {
    {linear_plan, linear_run, linear_scratch},
    {linear_plan, linear_run, linear_scratch},
    {plan_rows, gated_activation_run, no_scratch},
    {plan_rows, rms_norm_run, row_scratch},
    {plan_rows, rms_norm_run, row_scratch},
    {plan_rows, layer_norm_run, row_scratch},
    {plan_tokens, rotary_run, no_scratch},
    {plan_tokens, rotary_write_kv_run, no_scratch},
    {plan_tokens, write_kv_run, no_scratch},
    {attention_plan, attention_run, attention_scratch},
    {encoder_attention_plan, encoder_attention_run, encoder_attention_scratch},
    {plan_rows, embedding_run, no_scratch},
    {plan_rows, elementwise_run, no_scratch},
    {plan_rows, copy_run, no_scratch},
    {argmax_plan, argmax_run, no_scratch},
    {mask_tokens_plan, mask_tokens_run, no_scratch},
    {sample_plan, sample_run, sample_scratch},
    {route_plan, route_run, route_scratch},
    {gated_experts_plan, gated_experts_run, gated_experts_scratch},
    {combine_experts_plan, combine_experts_run, combine_experts_scratch},
    {lora_shrink_plan, lora_shrink_run, no_scratch},
    {linear_plan, linear_run, linear_scratch},
    {linear_plan, linear_run, linear_scratch},
};

}  // namespace
}  // namespace RBLN_ISA

KernelTable RBLN_JOIN(kernels_, RBLN_ISA)() { return RBLN_ISA::kTable; }

}  // namespace rbln
