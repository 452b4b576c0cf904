# SPDX-License-Identifier: Apache-2.0
"""Programs made from one symbolic export equal those exported at their own size."""

import pytest
import torch
from torch import Tensor

from rbln_host.compiler import batches
from rbln_host.compiler.batches import capture_batches
from rbln_host.compiler.capture import Captured, capture
from rbln_host.compiler.serial import dumps, loads
from rbln_host.runtime.interpreter import Interpreter

SIZES = {1: "b1", 2: "b2", 5: "b5", 8: "b8"}
AXES = {"hidden": 0, "slots": 0}


class Layer(torch.nn.Module):
    """Views, reshapes, a KV write and sizes computed from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, hidden: Tensor, slots: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        batch = hidden.shape[0]
        key = self.project(hidden).view(batch, 2, 4)
        torch.ops.rbln.write_kv(key, key, kv, slots)
        rows = torch.arange(batch).unsqueeze(1) + hidden.new_zeros(batch * 2, 4)[:batch]
        return key.reshape(batch * 2, 4).sum(0, keepdim=True), rows


class AnyKeyword(Layer):
    """Takes the pool as any keyword, as the model's wrapper does."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, slots: Tensor, **pools: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().forward(hidden, slots, pools["kv"])


class Branching(torch.nn.Module):
    """Not one program for all sizes."""

    def forward(self, hidden: Tensor, slots: Tensor, kv: Tensor) -> Tensor:
        return hidden * 2 if hidden.shape[0] > 3 else hidden + slots[:, None]


def inputs(size: int) -> dict[str, Tensor]:
    torch.manual_seed(size)
    return {
        "hidden": torch.randn(size, 8),
        "slots": torch.arange(size),
        "kv": torch.zeros(3, 2, 4, 8),
    }


def outputs(captured: Captured, size: int) -> list[Tensor]:
    given = inputs(size)
    program = Interpreter(loads(dumps(captured.graph)), captured.weights)
    return [*program.run(given), given["kv"]]


@pytest.mark.parametrize("module", [Layer(), AnyKeyword(), Branching()])
def test_each_size_equals_its_own_export(module: torch.nn.Module) -> None:
    family = capture_batches(module, inputs(4), SIZES, AXES, {"kv": 0})
    for (size, name), captured in zip(SIZES.items(), family, strict=True):
        alone = capture(module, inputs(size), name, {"kv": 0})
        assert captured.graph.name == name
        assert captured.graph.inputs == alone.graph.inputs
        for ours, theirs in zip(outputs(captured, size), outputs(alone, size), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("module", [Layer(), AnyKeyword()])
def test_one_export_serves_all_sizes(
    module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports: list[str] = []
    original = batches.export_module

    def counted(module: torch.nn.Module, *args: object) -> object:
        exports.append(type(module).__name__)
        return original(module, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(batches, "export_module", counted)
    monkeypatch.setattr(batches, "capture", lambda *_: pytest.fail("exported per size"))
    capture_batches(module, inputs(4), SIZES, AXES, {"kv": 0})
    assert exports == [type(module).__name__]


def test_the_programs_are_static() -> None:
    family = capture_batches(Layer(), inputs(4), SIZES, AXES, {"kv": 0})
    assert not any(b"sym" in dumps(captured.graph) for captured in family)
    assert {tuple(c.weights) for c in family} == {tuple(family[0].weights)}
