# SPDX-License-Identifier: Apache-2.0
"""Passes, graph to graph, one per file.

:func:`optimise` removes what a captured program does not need.
"""

from rbln_host.compiler.graph import Graph
from rbln_host.compiler.passes.drop_aliases import drop_aliases
from rbln_host.compiler.passes.drop_unread import drop_unread
from rbln_host.compiler.passes.share_equal import share_equal

__all__ = ["drop_aliases", "drop_unread", "optimise", "share_equal"]


def optimise(graph: Graph) -> Graph:
    """Drop other names of values, compute equal values once, drop what nobody reads."""
    return drop_unread(share_equal(drop_aliases(graph)))
