# SPDX-License-Identifier: Apache-2.0
"""Passes, graph to graph, one per file.

:func:`optimise` removes what a captured program does not need. :func:`lower` turns it into the
fused operators of ``rbln_host.ops``, in which each pass finds what those before it have made.
"""

from rbln_host.compiler.graph import Captured, Graph
from rbln_host.compiler.passes.attach_adapters import attach_adapters
from rbln_host.compiler.passes.canonicalise import canonicalise
from rbln_host.compiler.passes.drop_aliases import drop_aliases
from rbln_host.compiler.passes.drop_buffers import drop_buffers
from rbln_host.compiler.passes.drop_inplace_views import drop_inplace_views
from rbln_host.compiler.passes.drop_unread import drop_unread
from rbln_host.compiler.passes.drop_views import drop_views
from rbln_host.compiler.passes.elementwise import elementwise
from rbln_host.compiler.passes.fold_weights import fold_weights
from rbln_host.compiler.passes.fuse_gated import fuse_gated
from rbln_host.compiler.passes.fuse_linear import fuse_linear
from rbln_host.compiler.passes.fuse_norm import fuse_norm
from rbln_host.compiler.passes.fuse_rotary import fuse_rotary
from rbln_host.compiler.passes.fuse_rotary_write import fuse_rotary_write
from rbln_host.compiler.passes.fuse_rotate_half import fuse_rotate_half
from rbln_host.compiler.passes.merge_linear import merge_linear
from rbln_host.compiler.passes.rewrite import Made
from rbln_host.compiler.passes.share_equal import share_equal

__all__ = [
    "Made",
    "attach_adapters",
    "canonicalise",
    "drop_aliases",
    "drop_buffers",
    "drop_inplace_views",
    "drop_unread",
    "drop_views",
    "elementwise",
    "fold_weights",
    "fuse_gated",
    "fuse_linear",
    "fuse_norm",
    "fuse_rotary",
    "fuse_rotary_write",
    "fuse_rotate_half",
    "lower",
    "merge_linear",
    "optimise",
    "share_equal",
]


def optimise(graph: Graph) -> Graph:
    """Drop other names of values, compute equal values once, drop what nobody reads."""
    return drop_unread(share_equal(drop_aliases(graph)))


def lower(captured: Captured, made: Made | None = None) -> Captured:
    """The program in fused operators, which computes the same up to rounding.

    ``made`` holds the weights that passes make (concatenated projections, folded norm weights):
    give one dict for all programs of a model and each is made once.
    Raises ArtifactError when a command of the program cannot run.
    """
    made = {} if made is None else made
    captured = Captured(drop_inplace_views(captured.graph), captured.weights)
    captured = fold_weights(captured, made)
    captured = fuse_rotary(captured)  # it makes the program half as long
    captured = drop_buffers(captured)
    captured = drop_views(captured)
    captured = canonicalise(captured, made)
    rotated = fuse_rotate_half(captured, made)
    captured = captured if rotated is captured else drop_views(rotated)
    captured = merge_linear(captured, made)
    captured = fuse_rotary_write(captured)
    captured = fuse_gated(captured)
    captured = fuse_norm(captured)
    captured = fuse_linear(captured)
    captured = elementwise(captured)
    graph = drop_unread(share_equal(captured.graph))
    return Captured(graph, {name: captured.weights[name] for name in graph.weights.values()})
