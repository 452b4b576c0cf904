# SPDX-License-Identifier: Apache-2.0
"""What is said of a program: commands, native share, flops, bytes."""

import pytest
import torch

from rbln_host.compiler.graph import Captured, Graph, TensorSpec
from rbln_host.compiler.pack import pack
from rbln_host.runtime.native import compiler_of
from rbln_host.runtime.native.segments import Compiler
from rbln_host.runtime.options import ExecutorOptions
from rbln_host.runtime.report import FallbackReport, ProgramReport, explain
from rbln_host.runtime.weight_store import WeightStore
from tests.unit.host import native_layer
from tests.unit.host.native_layer import fused, layer


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return compiler_of(ExecutorOptions())


def report(captured: Captured, compiler: Compiler) -> ProgramReport:
    weights = WeightStore()
    weights.add([captured])
    return explain(captured.graph, weights, compiler)


def test_a_layer(compiler: Compiler) -> None:
    found = report(layer(5, torch.float32).captured, compiler)
    sizes = native_layer
    columns = (
        (sizes.QUERY + sizes.PAIR) * sizes.HIDDEN
        + sizes.HIDDEN * sizes.QUERY
        + 2 * sizes.INNER * sizes.HIDDEN
        + sizes.HIDDEN * sizes.INNER
        + sizes.VOCABULARY * sizes.HIDDEN
    )
    assert found.flops == found.native_flops == 2 * 5 * columns
    context = sizes.TABLE * sizes.BLOCK
    assert found.attention_flops == 2 * 2 * 5 * sizes.QUERY * context
    assert (found.commands, found.native_commands, found.fallbacks) == (13, 13, ())


def test_bytes(compiler: Compiler) -> None:
    captured = layer(5, torch.bfloat16).captured
    found = report(captured, compiler)
    packed = ("embed", "qkv", "out", "gate_up", "down")
    expected = sum(pack(captured.weights[name]).nbytes for name in packed)
    plain = ("norm", "bias", "rope")
    assert found.weight_bytes == expected + sum(captured.weights[n].nbytes for n in plain)
    assert 0 < found.arena_bytes < 1 << 20


def test_fallbacks_are_counted_with_their_reason(compiler: Compiler) -> None:
    x = TensorSpec((6, 8), torch.float32)
    commands = (
        fused("aten::cumsum", "%x", 0, out=("%a",)),
        fused("aten::cumsum", "%a", 1, out=("%b",)),
        fused("aten::mm", "%b", "%w", out=("%c",)),
        fused("rbln::linear", "%c", "%w", None, None, "none", out=("%d",)),
        fused("aten::exp", "%w", out=("%once",)),
        fused("aten::t", "%d", out=("%view",)),
    )
    graph = Graph("p", {"%x": x}, {"%w": "w"}, commands, ("%view", "%once"))
    found = report(Captured(graph, {"w": torch.ones(8, 8)}), compiler)
    assert found.fallbacks == (
        FallbackReport("aten::cumsum", "no kernel does this", 2),
        FallbackReport("aten::mm", "no kernel does this", 1),
        FallbackReport("aten::exp", "no kernel does this", 1),
    )
    assert (found.commands, found.native_commands) == (5, 1)
    assert (found.flops, found.native_flops) == (4 * 6 * 8 * 8, 2 * 6 * 8 * 8)
    facts = found.facts()
    assert facts["fallbacks"][0]["commands"] == 2
    assert facts["name"] == "p"
