# SPDX-License-Identifier: Apache-2.0
"""Small programs built by hand, for tests that need one and not how it was captured."""

import torch
from torch import Tensor

from rbln_host.compiler.capture import Captured
from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.manifest import Manifest


def call(operator: str, *args: object, out: str, overload: str = "Tensor") -> Command:
    """`out = operator.overload(*args)`; strings among the arguments are values."""
    placed = tuple(Ref(a) if isinstance(a, str) else a for a in args)
    return Command(f"aten::{operator}", overload, placed, {}, (out,))


def scale_program(name: str, weights: dict[str, Tensor]) -> Captured:
    """`x * w1 * w2 …` for each weight in turn."""
    shape = next(iter(weights.values())).shape
    values = [f"p_{index}" for index in range(len(weights))]
    commands, last = [], "x"
    for index, value in enumerate(values):
        commands.append(call("mul", last, value, out=f"mul_{index}"))
        last = f"mul_{index}"
    graph = Graph(
        name,
        {"x": TensorSpec(tuple(shape), torch.float32)},
        dict(zip(values, weights, strict=True)),
        tuple(commands),
        (last,),
    )
    return Captured(graph, weights)


def manifest(**changes: object) -> Manifest:
    """A manifest of nothing yet."""
    fields: dict[str, object] = {
        "toolchain": "rbln_host",
        "toolchain_version": "0",
        "profile": "HOST",
        "num_devices": 1,
        "key": {},
        "model": {"kv_layers": []},
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]
