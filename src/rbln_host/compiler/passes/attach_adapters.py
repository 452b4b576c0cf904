# SPDX-License-Identifier: Apache-2.0
"""Pass: linears of adapted modules take their adapters from the program's inputs.

It comes last: what is fused by then is what is fused without adapters, and the adapters' part is
added inside the fused command. So tokens without one are computed as in a program without any.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from rbln_host.compiler.adapters import (
    RANKS_INPUT,
    SLOTS_INPUT,
    AdaptedModule,
    Adapters,
    a_input,
    b_input,
)
from rbln_host.compiler.graph import Captured, Command, Graph, Ref, TensorSpec
from rbln_host.errors import CaptureError
from rbln_host.ops.lora import MAX_PARTS

_ADAPTED = {
    "rbln::linear": "rbln::lora_linear",
    "rbln::gated_linear": "rbln::lora_gated_linear",
}


def attach_adapters(captured: Captured, adapters: Adapters) -> Captured:
    """The program with adapters, and their inputs behind its own.

    Raises CaptureError for a module whose linear no command computes any more.
    """
    graph = captured.graph
    tokens = next(iter(graph.inputs.values())).shape[0]
    commands: list[Command] = []
    found: set[str] = set()
    for number, command in enumerate(graph.commands):
        parts = _parts(graph, command, adapters)
        found.update(part.module.name for part in parts)
        commands += _adapted(command, parts, adapters, f"lora_shrunk_{number}")
    missing = sorted(adapters.places.keys() - found)
    if missing:
        raise CaptureError(
            f"program {graph.name}: the linears {missing[:3]} cannot have adapters: they are not "
            "computed by a product with their weight. Leave them out of --lora-target-modules, "
            "or leave out --enable-lora"
        )
    inputs = {SLOTS_INPUT: TensorSpec((tokens,), torch.int32), **dict(adapters.input_specs())}
    done = replace(graph, inputs={**graph.inputs, **inputs}, commands=tuple(commands))
    return Captured(done, captured.weights)


@dataclass(frozen=True)
class _Part:
    """A module and where its output features start in a linear's."""

    module: AdaptedModule
    start: int


def _parts(graph: Graph, command: Command, adapters: Adapters) -> list[_Part]:
    """The adapted modules that a command computes."""
    value = command.args[1] if command.operator in _ADAPTED else None
    name = graph.weights.get(value.name) if isinstance(value, Ref) else None
    parts = [] if name is None else [p for p in _in_weight(name, adapters) if p.module.is_adapted]
    if len(parts) > MAX_PARTS:
        raise CaptureError(
            f"program {graph.name}: {len(parts)} adapted modules are computed as one; at most "
            f"{MAX_PARTS} can be: choose fewer with --lora-target-modules"
        )
    return parts


def _in_weight(name: str, adapters: Adapters) -> Iterator[_Part]:
    """The modules in a weight; passes put weights on top of each other, or store them turned."""
    pieces = [adapters.by_weight.get(p.removesuffix("^T"), ()) for p in name.split("|")]
    if not all(pieces):
        return
    start = 0
    for module in chain.from_iterable(pieces):
        yield _Part(module, start)
        start += module.out_features


def _adapted(
    command: Command, parts: Sequence[_Part], adapters: Adapters, shrunk: str
) -> list[Command]:
    if not parts:
        return [command]
    modules = tuple(adapters.places[part.module.name] for part in parts)
    slots, ranks = Ref(SLOTS_INPUT), Ref(RANKS_INPUT)
    a = tuple(Ref(a_input(part.module.name)) for part in parts)
    b = tuple(Ref(b_input(part.module.name)) for part in parts)
    shrink_args = (command.args[0], slots, ranks, a, modules)
    starts = tuple(part.start for part in parts)
    sizes = tuple(part.module.out_features for part in parts)
    args = (*command.args, Ref(shrunk), slots, ranks, b, modules, starts, sizes)
    return [
        Command("rbln::lora_shrink", "default", shrink_args, {}, (shrunk,)),
        replace(command, operator=_ADAPTED[command.operator], args=args),
    ]
