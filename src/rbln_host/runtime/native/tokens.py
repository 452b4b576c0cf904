# SPDX-License-Identifier: Apache-2.0
"""Which kernels may leave out the rows of padding.

A program has a fixed number of tokens; a step may have fewer, and the rest is padding. Where every
command works row by row, the rows of padding need not be computed: no other row sees them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rbln_host.compiler.graph import Graph
from rbln_host.compiler.plan import Plan, View
from rbln_host.runtime.native.commands.call import NativeCommand
from rbln_host.runtime.native.segments import Fallback, Native, Step

ROW_BY_ROW = frozenset(
    {
        *(
            f"rbln::{name}"
            for name in (
                "combine_experts",
                "elementwise",
                "encoder_attention",  # it reads other tokens, of its row: none of them is padding
                "fused_add_rms_norm",
                "gated_activation",
                "gated_experts",
                "gated_linear",
                "layer_norm",
                "linear",
                "lora_gated_linear",
                "lora_linear",
                "lora_shrink",
                "paged_attention",
                "rms_norm",
                "rotary_embedding",
                "rotary_write_kv",
                "route",
                "write_kv",
            )
        ),
        "aten::argmax",
        "aten::clone",
        "aten::copy_",
        "aten::embedding",
        "aten::index_select",
        "aten::to",
    }
)
"""Operators that compute entry i of axis 0 from entries i of axis 0."""


@dataclass(frozen=True)
class TokenRows:
    """``count`` tokens, and the values whose axis 0 they are."""

    count: int
    values: frozenset[str]

    def limited(self, step: Native, plan: Plan) -> tuple[NativeCommand, ...]:
        """The step's kernels, marked where they may compute the first tokens alone."""
        return tuple(
            replace(kernel, by_token=self._covers(step, kernel, plan)) for kernel in step.kernels
        )

    def _covers(self, step: Native, kernel: NativeCommand, plan: Plan) -> bool:
        views = [plan.views[name] for name in step.command.outputs if name]
        if not all(name in self.values for name in step.command.outputs if name):
            return False
        if any(not view.dtype.is_floating_point for view in views):
            return False  # a row left out would be an index out of range to who reads it
        rows = (kernel.operands[0], kernel.operands[-1])
        return all(
            operand is not None
            and operand.shape[0] == self.count
            and _leads(operand.shape, operand.strides)
            for operand in rows
            if kernel.op != "embedding" or operand is kernel.operands[-1]
        )


def token_rows(graph: Graph, plan: Plan, steps: Iterable[Step]) -> TokenRows | None:
    """The tokens of a program; None when some command may mix rows, or torch runs one."""
    first = next(iter(graph.inputs.values()), None)
    if first is None or not first.shape or first.shape[0] < 2:
        return None
    if any(isinstance(step, Fallback) for step in steps):
        return None
    count = first.shape[0]
    values = {name for name, spec in graph.inputs.items() if spec.shape[:1] == (count,)}
    moved: set[str] = set()  # views whose first axis is not the tokens
    for command, work in zip(graph.commands, plan.work, strict=True):
        inputs = set(command.inputs())
        if inputs.isdisjoint(values | moved):
            continue
        if work.costs and (command.operator not in ROW_BY_ROW or inputs & moved):
            return None
        for name in filter(None, command.outputs):
            if _is_of_tokens(plan.views[name], count):
                values.add(name)
            elif work.costs:
                return None
            else:
                moved.add(name)
    return TokenRows(count, frozenset(values))


def _is_of_tokens(view: View, count: int) -> bool:
    """Whether the first axis that is not 1 is the tokens, as in ``[1, N, H]``."""
    ones = next((axis for axis, size in enumerate(view.shape) if size != 1), 0)
    shape, strides = view.shape[ones:], view.strides[ones:]
    return shape[:1] == (count,) and _leads(shape, strides)


def _leads(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether axis 0 is the outermost in memory: it was not moved there by a transposition."""
    real = [stride for size, stride in zip(shape, strides, strict=True) if size > 1]
    return strides[0] == max(real, default=strides[0])
