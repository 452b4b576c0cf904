# SPDX-License-Identifier: Apache-2.0
"""Modules of which one export cannot give every batch size, and those that look as if."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rbln_host.compiler import batches
from rbln_host.compiler.batches import capture_batches
from rbln_host.compiler.capture import capture
from rbln_host.compiler.serial import dumps, loads
from rbln_host.errors import CaptureError
from rbln_host.runtime.interpreter import Interpreter

NAMES = {1: "b1", 2: "b2", 5: "b5"}
SIZES = tuple(NAMES)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sizes or ways of exporting, one for each export that was made."""
    made: list[str] = []
    one, symbolic = batches.capture, batches.export_module

    def count_one(*args: object, **options: object) -> object:
        made.append("one size")
        return one(*args, **options)  # type: ignore[arg-type]

    def count_symbolic(*args: object, **options: object) -> object:
        made.append("symbolic")
        return symbolic(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(batches, "capture", count_one)
    monkeypatch.setattr(batches, "export_module", count_symbolic)
    return made


class Step(nn.Module):
    """A little of everything a decode program does: embedding, split, views, sizes, KV pool."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)

    def forward(
        self, input_ids: Tensor, Slots: Tensor, table: Tensor, query_pos: Tensor, pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden = self.embed(input_ids)
        query, key, value = (x.view(-1, 2, 4) for x in self.qkv(hidden).chunk(3, dim=-1))
        torch.ops.rbln.write_kv(key, value, pool, Slots)
        attended = torch.ops.rbln.paged_attention(
            query, pool, table, query_pos, 0.5, 0, 0.0, None, None
        )
        flat = attended.reshape(hidden.shape[0], 8) + torch.zeros(hidden.shape[0], 1)
        return flat + hidden.float().to(torch.float32), flat.flip(0)


def step_inputs(batch: int) -> dict[str, Tensor]:
    torch.manual_seed(batch)
    return {
        "input_ids": torch.randint(0, 11, (batch,), dtype=torch.int32),
        "Slots": torch.arange(1, batch + 1) * 4,
        "table": torch.arange(1, batch + 1, dtype=torch.int32)[:, None],
        "query_pos": torch.zeros(batch, dtype=torch.int32),
        "pool": torch.zeros(8, 2, 4, 8),
    }


BATCH_AXES = dict.fromkeys(("input_ids", "Slots", "table", "query_pos"), 0)


def test_equal_programs_of_each_size(exports: list[str]) -> None:
    module = Step().eval()
    captured = capture_batches(module, step_inputs(3), NAMES, BATCH_AXES, {"pool": 0})
    assert exports == ["symbolic"]
    assert [item.graph.name for item in captured] == list(NAMES.values())
    for size, item in zip(SIZES, captured, strict=True):
        alone = capture(module, step_inputs(size), NAMES[size], {"pool": 0})
        assert item.graph.inputs == alone.graph.inputs
        assert set(item.weights) == set(alone.weights)
        ours, theirs = step_inputs(size), step_inputs(size)
        outputs = Interpreter(loads(dumps(item.graph)), item.weights).run(ours)
        with torch.no_grad():
            expected = module(**theirs)
        assert all(map(torch.equal, outputs, expected))
        assert torch.equal(ours["pool"], theirs["pool"])


def test_weights_are_the_same_memory() -> None:
    captured = capture_batches(Step().eval(), step_inputs(3), NAMES, BATCH_AXES, {"pool": 0})
    pointers = [{n: t.data_ptr() for n, t in item.weights.items()} for item in captured]
    assert pointers[0] == pointers[1] == pointers[2]


def test_one_size_is_exported_as_it_is(exports: list[str]) -> None:
    (captured,) = capture_batches(Step(), step_inputs(3), {2: "b2"}, BATCH_AXES, {"pool": 0})
    assert exports == ["one size"]
    assert captured.graph.inputs["table"].shape == (2, 1)


@pytest.mark.parametrize(
    "forward",
    [
        lambda hidden: hidden * 2 if hidden.shape[0] == 1 else hidden * 3,
        lambda hidden: hidden * 2 if hidden.shape[0] > 2 else hidden * 3,
        lambda hidden: hidden * (1 / hidden.shape[0]),
        lambda hidden: hidden + torch.full((5, 4), 1.0)[: hidden.shape[0]].sum() / hidden.shape[0],
    ],
)
def test_modules_that_look_at_their_batch(
    forward: Callable[[Tensor], Tensor], exports: list[str]
) -> None:
    class Looks(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return forward(hidden)

    captured = capture_batches(Looks(), {"hidden": torch.ones(3, 4)}, NAMES, {"hidden": 0})
    assert exports[0] == "symbolic"
    for size, item in zip(SIZES, captured, strict=True):
        hidden = torch.randn(size, 4)
        (output,) = Interpreter(item.graph, item.weights).run({"hidden": hidden})
        assert torch.equal(output, forward(hidden))


def test_what_no_size_allows_is_refused() -> None:
    class Bad(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden[hidden > 0]

    with pytest.raises(CaptureError, match="program b1"):
        capture_batches(Bad(), {"hidden": torch.ones(3, 4)}, NAMES, {"hidden": 0})


def test_any_keyword_may_be_an_input() -> None:
    class AnyKeyword(nn.Module):
        def forward(self, hidden: Tensor, **others: Tensor) -> Tensor:
            return hidden + sum(others.values())

    inputs = {name: torch.ones(3, 4) for name in ("hidden", "KV_1", "kv_0")}
    captured = capture_batches(AnyKeyword(), inputs, NAMES, dict.fromkeys(inputs, 0))
    for size, item in zip(SIZES, captured, strict=True):
        assert list(item.graph.inputs) == list(inputs)
        given = {name: torch.ones(size, 4) for name in inputs}
        (output,) = Interpreter(item.graph, item.weights).run(given)
        assert torch.equal(output, torch.full((size, 4), 3.0))


def test_the_module_is_left_as_it_was() -> None:
    """Its forward may be its own, as libraries that hook into modules make it."""
    module, plain = nn.Identity(), nn.Identity()
    replaced = module.forward = lambda hidden: hidden * 2  # type: ignore[method-assign]
    (doubled,) = capture_batches(module, {"hidden": torch.ones(1)}, {1: "x"}, {"hidden": 0})
    assert module.forward is replaced
    assert Interpreter(doubled.graph, {}).run({"hidden": torch.ones(1)})[0] == 2
    capture(nn.Sequential(plain), {"input": torch.ones(1)}, "x")
    assert "forward" not in vars(plain)
