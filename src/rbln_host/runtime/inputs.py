# SPDX-License-Identifier: Apache-2.0
"""The check of what a program is given, the same for every executor."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from rbln_host.compiler.graph import Graph

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
"""No inputs."""

ALL_TOKENS = (1 << 63) - 1
"""As a number of tokens: as many as the program has."""


def checked_inputs(graph: Graph, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The inputs in the program's order, others left out. ValueError when one is missing or of
    another shape or dtype."""
    for name in graph.inputs:
        if name not in inputs:
            raise ValueError(f"program {graph.name}: input {name!r} is missing")
        check_input(graph, name, inputs[name])
    return [inputs[name] for name in graph.inputs]


def check_input(graph: Graph, name: str, tensor: Tensor) -> None:
    """ValueError for a tensor of another shape or dtype than the input ``name``."""
    spec = graph.inputs[name]
    if not spec.matches(tensor):
        raise ValueError(
            f"program {graph.name}: input {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"not {spec.dtype} {spec.shape}"
        )
