# SPDX-License-Identifier: Apache-2.0
"""Module -> program -> file -> interpreter gives what eager gives, bit for bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)
from rbln_host.compiler.capture import Captured, capture
from rbln_host.compiler.passes import optimise
from rbln_host.compiler.serial import dumps, loads
from rbln_host.errors import CaptureError
from rbln_host.runtime.interpreter import Interpreter


def copies(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def check(module: nn.Module, inputs: Mapping[str, Tensor], **options: Any) -> Captured:
    """Capture, store, load and run twice; outputs and written inputs must equal eager's."""
    module = module.eval()
    captured = capture(module, copies(inputs), "program", **options)
    graph = loads(dumps(captured.graph))
    assert dumps(graph) == dumps(captured.graph)
    assert set(captured.weights) == set(graph.weights.values())
    program = Interpreter(graph, captured.weights)
    for _ in range(2):
        ours, theirs = copies(inputs), copies(inputs)
        outputs = program.run(ours)
        with torch.no_grad():
            expected = module(**theirs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(outputs) == len(expected)
        assert all(map(torch.equal, outputs, expected))
        assert all(torch.equal(ours[name], theirs[name]) for name in inputs)
    return captured


def operators(captured: Captured) -> list[str]:
    return [command.operator for command in captured.graph.commands]


class MLP(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate_up = nn.Linear(8, 24, bias=False, dtype=dtype)
        self.down = nn.Linear(12, 8, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return down


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(input_ids))
        return logits


class SharedBuffer(nn.Module):
    """A rotary table that two layers share, kept out of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(16, 8)
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        for layer in self.layers:
            layer.register_buffer("table", table, persistent=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden * layer.get_buffer("table")[positions]
        return hidden


class Constants(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 4.0, float("inf")])
        same = torch.tensor([1.0, 2.0, 4.0, float("inf")])
        fresh = torch.tensor([1.0, 1.0, 1.0, 1.0])
        fresh.add_(1)
        return hidden * scale + same.reciprocal() + fresh


class Pieces(nn.Module):
    """Tuples of which members are never read, and one read twice."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pieces = hidden.split((2, 3, 3), dim=-1)
        halves = hidden.chunk(2, dim=-1)
        values, _ = hidden.max(dim=-1)
        rows = hidden.unbind(0)
        return pieces[1] + pieces[1].flip(-1) + values[:, None], halves[1] * rows[2][:4]


class WritesView(nn.Module):
    """Reads an input, writes to a slice of it in place, reads it again."""

    def forward(self, cache: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        before = cache.sum(dim=-1)
        cache[1:3].copy_(new)
        cache[0] = 7
        return before, cache.sum(dim=-1)


class InPlace(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        total = hidden * 1
        flat = total.view(-1)
        first = total + 1
        flat.mul_(2)
        total += hidden
        return first - (total + 1)


class Casts(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        same = hidden.float().to(torch.float32).contiguous()
        # Answered while the module is captured; no command is left of it.
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float64)).float()
        copied = hidden.to(torch.float32, copy=True)
        copied.add_(1)
        return same + wide, hidden + copied


class Arguments(nn.Module):
    """Arguments that JSON lacks: dtypes, infinities, devices, memory formats, nested lists."""

    def forward(self, hidden: Tensor) -> Tensor:
        mask = torch.full((8, 8), float("-inf"), dtype=torch.float32, device="cpu").triu(1)
        grid = torch.arange(8, dtype=torch.int64)
        index = hidden[:, grid.flip(0)][[0, 2]]
        nans = torch.nan_to_num(hidden * float("nan"), nan=3.0)
        same = hidden.clone(memory_format=torch.contiguous_format)
        return torch.softmax(mask, dim=-1, dtype=torch.float64)[:3] + index.sum(0) + nans + same


class PagedStep(nn.Module):
    """What a model does with the KV pool: write, then read it."""

    def forward(self, kv_cache: Tensor, rows: Tensor, slots: Tensor, query_pos: Tensor) -> Tensor:
        table = torch.tensor([[1, 2]], dtype=torch.int32)

        def attend() -> Tensor:
            read: Tensor = torch.ops.rbln.paged_attention(
                rows, kv_cache, table, query_pos, 0.5, 0, 0.0, None, None
            )
            return read

        before = attend()
        torch.ops.rbln.write_kv(key_NHD=rows, value_NHD=rows, kv_cache=kv_cache, slots_N=slots)
        return before - attend()


HIDDEN = {"hidden": torch.randn(3, 8)}
CASES: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {
    "linear": (nn.Sequential(nn.Linear(8, 5)), {"input": torch.randn(3, 8)}),
    "mlp": (MLP(), HIDDEN),
    "mlp bf16": (MLP(torch.bfloat16), {"hidden": torch.randn(3, 8).bfloat16()}),
    "tied head": (TiedHead(), {"input_ids": torch.tensor([3, 1, 10], dtype=torch.int32)}),
    "shared buffer": (SharedBuffer(), {**HIDDEN, "positions": torch.tensor([4, 0, 15])}),
    "constants": (Constants(), {"hidden": torch.randn(3, 4)}),
    "pieces": (Pieces(), HIDDEN),
    "written view": (WritesView(), {"cache": torch.zeros(4, 5), "new": torch.randn(2, 5)}),
    "in place": (InPlace(), HIDDEN),
    "casts": (Casts(), HIDDEN),
    "arguments": (Arguments(), HIDDEN),
}


@pytest.mark.parametrize("case", list(CASES))
def test_equals_eager(case: str) -> None:
    check(*CASES[case])


def test_reads_of_the_pool_around_a_write_are_both_done() -> None:
    pool = torch.zeros(4, 1, 4, 8)
    inputs = {
        "kv_cache": pool,
        "rows": torch.randn(3, 1, 4),
        "slots": torch.tensor([4, 5, 6]),
        "query_pos": torch.tensor([0, 1, 2], dtype=torch.int32),
    }
    captured = check(PagedStep(), inputs, free_axes={"kv_cache": 0})
    assert operators(captured).count("rbln::paged_attention") == 2
    assert captured.graph.inputs["kv_cache"].shape == (-1, 1, 4, 8)
    bigger = {**inputs, "kv_cache": torch.zeros(9, 1, 4, 8)}
    (output,) = Interpreter(captured.graph, captured.weights).run(bigger)
    assert torch.equal(output, PagedStep()(**copies(inputs)))


class TestWeights:
    def test_tied_are_one(self) -> None:
        captured = check(*CASES["tied head"])
        assert list(captured.weights) == ["embed.weight"]

    def test_shared_buffers_are_one(self) -> None:
        captured = check(*CASES["shared buffer"])
        assert list(captured.weights) == ["layers.0.table"]

    def test_equal_constants_are_one(self) -> None:
        captured = check(*CASES["constants"])
        assert len(captured.weights) == 2
        assert all(name.startswith("constant.") for name in captured.weights)

    def test_constants_are_named_by_content(self) -> None:
        class One(nn.Module):
            def __init__(self, constant: Tensor) -> None:
                super().__init__()
                self.constant = constant

            def forward(self, hidden: Tensor) -> Tensor:
                return hidden * self.constant

        def name(constant: Tensor) -> str:
            (found,) = capture(One(constant), {"hidden": torch.ones(2, 2)}, "x").weights
            return found

        ones = torch.ones(2, 2)
        assert name(ones) == name(ones.clone())
        assert name(ones) != name(ones.double())
        assert name(ones) != name(torch.ones(2))

    def test_are_the_modules_own_memory(self) -> None:
        module = MLP()
        captured = capture(module, HIDDEN, "x")
        assert captured.weights["down.weight"].data_ptr() == module.down.weight.data_ptr()
        assert not captured.weights["down.weight"].requires_grad

    def test_unread_are_left_out(self) -> None:
        module = MLP()
        module.other = nn.Linear(8, 8)
        assert not any("other" in name for name in capture(module, HIDDEN, "x").weights)

    def test_writing_to_one_is_refused(self) -> None:
        class Counter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.count = nn.Buffer(torch.zeros(2, 3))

            def forward(self, hidden: Tensor) -> Tensor:
                self.count[1].add_(1)
                return hidden + self.count

        with pytest.raises(CaptureError, match="program x: it writes to the weight 'count'"):
            capture(Counter(), {"hidden": torch.ones(2, 3)}, "x")

    def test_writing_to_what_was_computed_from_one_is_not(self) -> None:
        class Convolution(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.convolution = nn.Conv1d(2, 2, 3, bias=False)

            def forward(self, hidden: Tensor) -> Tensor:
                return torch.relu_(self.convolution(hidden))

        check(Convolution(), {"hidden": torch.randn(1, 2, 9)})


class TestInputs:
    def test_keep_their_names_and_order(self) -> None:
        class Named(nn.Module):
            def forward(self, query_NHD: Tensor, Add: Tensor, **kv: Tensor) -> Tensor:
                return query_NHD + Add + sum(kv.values())

        names = ("query_NHD", "Add", "kv_1", "KV_0")
        captured = check(Named(), {n: torch.randn(2) * i for i, n in enumerate(names)})
        assert tuple(captured.graph.inputs) == names

    def test_unread_stay(self) -> None:
        class Ignores(nn.Module):
            def forward(self, hidden: Tensor, unread: Tensor) -> Tensor:
                return hidden + 1

        captured = check(Ignores(), {**HIDDEN, "unread": torch.ones(2)})
        assert list(captured.graph.inputs) == ["hidden", "unread"]

    def test_returned_as_they_are(self) -> None:
        class Identity(nn.Module):
            def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
                return hidden, hidden.detach()

        assert check(Identity(), HIDDEN).graph.commands == ()


def _conditional(hidden: Tensor) -> Any:
    return torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,))


class TestRefusals:
    @pytest.mark.parametrize(
        ("forward", "reason"),
        [
            (lambda hidden: hidden[hidden > 0], "fixed sizes"),
            (lambda hidden: hidden + int(hidden.sum().item()), "cannot be captured"),
            (lambda hidden: (hidden, None), "not only tensors"),
            (lambda hidden: (hidden, 3), "not only tensors"),
            (lambda hidden: hidden.numpy(), "cannot be captured"),
            (lambda hidden: hidden.resize_(3), "outside its tensors"),
            (lambda hidden: hidden.as_strided((2,), (1,)), "outside its tensors"),
            (lambda hidden: hidden * 1j, "cannot hold 1j"),
            (_conditional, "control flow"),
        ],
    )
    def test_says_which_program_and_why(self, forward: Any, reason: str) -> None:
        class Bad(nn.Module):
            def forward(self, hidden: Tensor) -> Any:
                return forward(hidden)

        with pytest.raises(CaptureError, match=rf"(?s)program bad: .*({reason})"):
            capture(Bad(), HIDDEN, "bad")

    def test_operators_of_others(self) -> None:
        with torch.library._scoped_library("rbln_test_other", "DEF") as library:
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")

            class Foreign(nn.Module):
                def forward(self, hidden: Tensor) -> Tensor:
                    doubled: Tensor = torch.ops.rbln_test_other.double(hidden)
                    return doubled

            with pytest.raises(CaptureError, match="needs a replacement"):
                capture(Foreign(), HIDDEN, "x")


def test_data_of_a_weight_is_traced() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * self.weight.data

    captured = check(Scaled(), HIDDEN)
    assert list(captured.weights) == ["weight"]
    assert operators(captured) == ["aten::mul"]


def test_is_optimised_and_stable() -> None:
    first, second = (capture(MLP(), HIDDEN, "x").graph for _ in range(2))
    assert first == second == optimise(first)
