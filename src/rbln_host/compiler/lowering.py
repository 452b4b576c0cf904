# SPDX-License-Identifier: Apache-2.0
"""From captured programs to those that are stored and run."""

from collections.abc import Iterable
from dataclasses import replace

from rbln_host.compiler.capture import canonical_names
from rbln_host.compiler.graph import Captured
from rbln_host.compiler.passes import Made, attach_adapters, lower


def lowered(captured: Iterable[Captured]) -> list[Captured]:
    """Programs in fused operators, with one name for the same memory in all (tied weights).

    Lowering what is lowered changes nothing.
    """
    made: Made = {}
    return [_lower(item, made) for item in _one_name_each(list(captured))]


def _lower(item: Captured, made: Made) -> Captured:
    done = lower(item, made)
    if item.adapters is not None:
        done = attach_adapters(done, item.adapters)
    read = set(done.graph.weights.values())
    return Captured(done.graph, {name: done.weights[name] for name in done.weights if name in read})


def _one_name_each(items: list[Captured]) -> list[Captured]:
    names = canonical_names(pair for item in items for pair in item.weights.items())
    return [
        Captured(
            replace(
                item.graph,
                weights={value: names[weight] for value, weight in item.graph.weights.items()},
            ),
            {names[weight]: tensor for weight, tensor in item.weights.items()},
            None if item.adapters is None else item.adapters.renamed(names),
        )
        for item in items
    ]
