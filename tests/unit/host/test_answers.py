# SPDX-License-Identifier: Apache-2.0
"""An answer from memory is the one that torch's fake mode gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)
from rbln_host.compiler.answers import Answers

aten, rbln = torch.ops.aten, torch.ops.rbln
HIDDEN, WEIGHT = (6, 8), (12, 8)

CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "linear": (aten.linear.default, lambda: (torch.ones(HIDDEN), torch.ones(WEIGHT))),
    "linear of columns": (aten.linear.default, lambda: (torch.ones(8, 6).T, torch.ones(WEIGHT))),
    "linear with bias": (
        aten.linear.default,
        lambda: (torch.ones(HIDDEN), torch.ones(WEIGHT), torch.ones(12)),
    ),
    "linear in bf16": (
        aten.linear.default,
        lambda: (torch.ones(HIDDEN).bfloat16(), torch.ones(WEIGHT).bfloat16()),
    ),
    "view": (aten.view.default, lambda: (torch.ones(HIDDEN), [6, 2, -1])),
    "view of rows": (aten.view.default, lambda: (torch.ones(6, 16)[:, :8], [6, 2, -1])),
    "split": (aten.split_with_sizes.default, lambda: (torch.ones(HIDDEN), [3, 5], -1)),
    "norm": (
        rbln.rms_norm.default,
        lambda: (torch.ones(HIDDEN), torch.ones(8), 1e-5, 0),
    ),
    "norm with residual": (
        rbln.fused_add_rms_norm.default,
        lambda: (torch.ones(HIDDEN), torch.ones(HIDDEN), None, 1e-5, 0),
    ),
    "gated": (rbln.gated_activation.default, lambda: (torch.ones(HIDDEN), "silu")),
    "gated, other": (rbln.gated_activation.default, lambda: (torch.ones(3, 8), "silu")),
    "expression": (
        rbln.elementwise.default,
        lambda: ([torch.ones(HIDDEN), torch.ones(8)], "i0 i1 add"),
    ),
}


def layouts(result: Any) -> list[tuple[Any, ...]]:
    tensors = (result,) if isinstance(result, Tensor) else tuple(result)
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


class Asked:
    """An operator that counts how often it is asked."""

    def __init__(self, function: Any) -> None:
        self._function, self._schema, self.times = function, function._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self._function(*args, **kwargs)


def test_an_answer_from_memory_is_the_fake_modes() -> None:
    """All in one memory, so that one call's answer is not taken for another's."""
    mode = FakeTensorMode()
    answers = Answers(mode)
    functions = {function: Asked(function) for function, _ in CALLS.values()}
    for _ in range(2):
        for function, make in CALLS.values():
            with mode, torch.inference_mode():
                args = make()
                expected = function(*args)
                assert layouts(answers.call(functions[function], args, {})) == layouts(expected)
    assert sum(asked.times for asked in functions.values()) == len(CALLS)


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (aten.view.default, lambda: (torch.ones(()), [1])),
        (aten.add.Tensor, lambda: (torch.ones(2), torch.ones(2))),
        (aten.copy_.default, lambda: (torch.ones(2), torch.ones(2))),
    ],
)
def test_others_are_asked_every_time(function: Any, make: Callable[[], tuple[Any, ...]]) -> None:
    mode, asked = FakeTensorMode(), Asked(function)
    answers = Answers(mode)
    for _ in range(2):
        with mode, torch.inference_mode():
            answers.call(asked, make(), {})
    assert asked.times == 2


def test_a_constant_keeps_its_value() -> None:
    mode = FakeTensorMode()
    answers = Answers(mode)
    for value in (3, 4):
        with mode, torch.inference_mode():
            constant = torch.tensor([value])
            seen = answers.call(aten.view.default, (constant, [1, 1]), {})
            assert seen.shape == (1, 1)
            assert isinstance(constant, FakeTensor)
            assert constant.constant is not None
