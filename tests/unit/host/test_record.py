# SPDX-License-Identifier: Apache-2.0
"""Recording at a size: what is decided by sizes is decided, and nothing is kept from a run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rbln_host.compiler.capture import Capturer, capture
from rbln_host.compiler.record import Recorder
from rbln_host.errors import CaptureError
from rbln_host.runtime.interpreter import Interpreter


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    "forward",
    [
        lambda hidden: hidden * 2 if hidden.shape[0] == 1 else hidden * 3,
        lambda hidden: hidden * (1 / hidden.shape[0]),
        lambda hidden: hidden + torch.full((5, 4), 1.0)[: hidden.shape[0]].sum() / hidden.shape[0],
        lambda hidden: torch.arange(hidden.shape[0]).unsqueeze(1) + hidden.view(-1, 2, 2).sum(1),
    ],
)
def test_modules_may_look_at_sizes(size: int, forward: Callable[[Tensor], Tensor]) -> None:
    class Looks(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return forward(hidden)

    captured = capture(Looks(), {"hidden": torch.empty(size, 4)}, "x")
    hidden = torch.randn(size, 4)
    (output,) = Interpreter(captured.graph, captured.weights).run({"hidden": hidden})
    assert torch.equal(output, forward(hidden))


def test_values_of_inputs_are_not_looked_at() -> None:
    class Doubles(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden.mul_(2)
            return hidden + 1

    given = torch.full((2,), 7.0)
    module = Doubles()
    recording = Recorder(module, {}, {}).record(module, {"hidden": given}, "x")
    assert given.tolist() == [7.0, 7.0]
    assert [call.function._schema.name for call in recording.calls] == ["aten::mul_", "aten::add"]


def test_the_module_knows_that_it_is_captured() -> None:
    class Asks(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * 2 if torch.compiler.is_compiling() else hidden * 3

    captured = capture(Asks(), {"hidden": torch.ones(2)}, "x")
    assert captured.graph.commands[0].args[1] == 2
    assert not torch.compiler.is_compiling()


def test_a_module_serves_several_functions() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    module = Tied()
    capturer = Capturer(module)
    embedded = capturer.capture(module.embed, {"input": torch.arange(2)}, "embed")
    logits = capturer.capture(module.head, {"input": torch.ones(2, 3)}, "x")
    assert list(embedded.weights) == list(logits.weights) == ["embed.weight"]
    assert embedded.weights["embed.weight"].data_ptr() == module.embed.weight.data_ptr()
    assert module.head.weight is module.embed.weight
    assert isinstance(module.head.weight, nn.Parameter)


def test_the_module_is_left_as_it_was() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Module()
            self.first.register_buffer("table", torch.ones(4))
            self.second = self.first

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * self.first.get_buffer("table") + self.second.get_buffer("table")

    module = Shared()
    table = module.first.table
    assert list(capture(module, {"hidden": torch.ones(4)}, "x").weights) == ["first.table"]
    assert module.first.table is table


def test_state_of_an_earlier_capture_is_refused() -> None:
    class Keeps(nn.Module):
        last: Tensor | None = None

        def forward(self, hidden: Tensor) -> Tensor:
            before = hidden if self.last is None else self.last
            self.last = hidden
            return hidden + before

    module = Keeps()
    capture(module, {"hidden": torch.ones(2)}, "first")
    with pytest.raises(CaptureError, match="program second: "):
        capture(module, {"hidden": torch.ones(2)}, "second")


def test_weights_computed_in_the_module_are_its_weights() -> None:
    """A view of a weight that a layer keeps is what the layer computes with."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.plain = self.weight.data

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * self.plain + self.weight

    assert list(capture(Shares(), {"hidden": torch.ones(4)}, "x").weights) == ["weight"]
