# SPDX-License-Identifier: Apache-2.0
"""The check of what a program is given, the same for every executor."""

from collections.abc import Mapping

from torch import Tensor

from rbln_host.compiler.graph import Graph


def checked_input(graph: Graph, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
    """The input ``name``. ValueError when it is missing or of another shape or dtype."""
    spec = graph.inputs[name]
    tensor = inputs.get(name)
    if tensor is None:
        raise ValueError(f"program {graph.name}: input {name!r} is missing")
    if not spec.matches(tensor):
        raise ValueError(
            f"program {graph.name}: input {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"not {spec.dtype} {spec.shape}"
        )
    return tensor
