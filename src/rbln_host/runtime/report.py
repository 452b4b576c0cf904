# SPDX-License-Identifier: Apache-2.0
"""What a program costs and how much of it is native, without running it."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from rbln_host.compiler.arguments import arguments_of
from rbln_host.compiler.graph import Command, Graph, Ref
from rbln_host.compiler.plan import Kind, Work, plan_memory
from rbln_host.compiler.shapes import infer
from rbln_host.runtime.native.commands.call import Site
from rbln_host.runtime.native.program import with_named_outputs
from rbln_host.runtime.native.segments import Compiler, Fallback
from rbln_host.runtime.weight_store import WeightStore


@dataclass(frozen=True)
class FallbackReport:
    """An operator that torch runs: how often, and why no kernel does."""

    operator: str
    reason: str
    commands: int


@dataclass(frozen=True)
class ProgramReport:
    """Sizes in bytes; flops are those of matrix products, a multiplication and an addition each.

    Attention is apart: its flops depend on the context and are given for the longest.
    """

    name: str
    commands: int
    """Commands with work in each run: not views, nor what is computed once."""
    native_commands: int
    flops: int
    native_flops: int
    attention_flops: int
    arena_bytes: int
    weight_bytes: int
    fallbacks: tuple[FallbackReport, ...]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "fallbacks": [asdict(fallback) for fallback in self.fallbacks]}


def explain(graph: Graph, weights: WeightStore, compiler: Compiler) -> ProgramReport:
    """Look at one program. Raises ArtifactError for one that cannot run."""
    graph = with_named_outputs(graph)
    tensors = infer(graph, weights.specs)
    plan = plan_memory(graph, tensors)
    steps = list(compiler.steps(graph, Site(plan, graph.weights, weights.packed_specs)))
    fallbacks = [step for step in steps if isinstance(step, Fallback)]
    flops = sum(_flops(step.command, tensors) for step in steps)
    used = {
        plan.storage(name).name
        for name in _read_by_work(graph, plan.work)
        if plan.storage(name).kind is Kind.WEIGHT
    }
    return ProgramReport(
        name=graph.name,
        commands=len(steps),
        native_commands=len(steps) - len(fallbacks),
        flops=flops,
        native_flops=flops - sum(_flops(step.command, tensors) for step in fallbacks),
        attention_flops=sum(_attention_flops(step.command, tensors) for step in steps),
        arena_bytes=plan.arena_bytes,
        weight_bytes=sum(weights[name].nbytes for name in used),
        fallbacks=_summed(fallbacks),
    )


def _read_by_work(graph: Graph, work: Iterable[Work]) -> Iterable[str]:
    for command, kind in zip(graph.commands, work, strict=True):
        if kind is not Work.NONE:
            yield from command.inputs()


def _summed(fallbacks: Iterable[Fallback]) -> tuple[FallbackReport, ...]:
    counts = Counter((step.command.operator, step.reason) for step in fallbacks)
    return tuple(FallbackReport(*key, count) for key, count in counts.most_common())


def _flops(command: Command, tensors: Mapping[str, Tensor]) -> int:
    """Of a matrix product: two for each element of the result and each of the summed axis."""
    summed = _SUMMED.get(command.operator)
    output = command.outputs[0] if command.outputs else None
    if summed is None or output is None:
        return 0
    operands = _operands(command, tensors)
    # A gate computes twice as many columns as it returns.
    factor = 4 if command.operator in _GATED else 2
    return factor * tensors[output].numel() * summed(operands)


def _attention_flops(command: Command, tensors: Mapping[str, Tensor]) -> int:
    """Scores and weighted values of every query against a full block table, or in an encoder
    against all tokens of rows that share them evenly."""
    if command.operator == "rbln::encoder_attention":
        operands = _operands(command, tensors)
        tokens, rows = operands["query_NHD"].shape[0], operands["row_starts_S"].shape[0] - 1
        return 4 * operands["query_NHD"].numel() * (tokens // max(1, rows))
    if command.operator != "rbln::paged_attention":
        return 0
    operands = _operands(command, tensors)
    context = operands["block_table_BT"].shape[1] * operands["kv_cache"].shape[2]
    return 4 * operands["query_NHD"].numel() * context


def _operands(command: Command, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    arguments = arguments_of(command).items()
    return {name: tensors[a.name] for name, a in arguments if isinstance(a, Ref)}


def _last_axis(name: str) -> Callable[[Mapping[str, Tensor]], int]:
    return lambda operands: operands[name].shape[-1]


_GATED = frozenset({"rbln::gated_linear", "rbln::gated_experts", "rbln::lora_gated_linear"})
_SUMMED: Mapping[str, Callable[[Mapping[str, Tensor]], int]] = {
    "rbln::linear": _last_axis("input_NK"),
    "rbln::gated_linear": _last_axis("input_NK"),
    "rbln::gated_experts": _last_axis("input_NH"),
    "rbln::combine_experts": lambda operands: math.prod(operands["gated_NSI"].shape[1:]),
    "rbln::lora_linear": _last_axis("input_NK"),
    "rbln::lora_gated_linear": _last_axis("input_NK"),
    "rbln::lora_shrink": _last_axis("input_NK"),
    "aten::linear": _last_axis("input"),
    "aten::matmul": _last_axis("self"),
    "aten::mm": _last_axis("self"),
    "aten::bmm": _last_axis("self"),
    "aten::addmm": _last_axis("mat1"),
    "aten::baddbmm": _last_axis("batch1"),
    "aten::convolution": lambda operands: math.prod(operands["weight"].shape[1:]),
}
