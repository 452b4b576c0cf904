# SPDX-License-Identifier: Apache-2.0
"""``rbln::elementwise``: an expression of elements, written in postfix.

A program is tokens with one space between: ``i<k>`` pushes input k, ``c<number>`` a constant
(``repr`` of a float), and the name of an operator replaces its one or two topmost values by its
result. ``"i0 i1 mul c0.5 add"`` is ``inputs[0] * inputs[1] + 0.5``.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from rbln_host.ops.activation import activate
from rbln_host.ops.library import define

MAX_INPUTS = 8
MAX_DEPTH = 8
"""Most values on the stack at once."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What an input may be."""

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "relu": torch.relu,
    "silu": lambda value: activate(value, "silu"),
    "gelu": lambda value: activate(value, "gelu"),
    "gelu_tanh": lambda value: activate(value, "gelu_tanh"),
    "square": lambda value: value * value,
    "cube": lambda value: value * value * value,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}

_INPUT = re.compile(r"i(0|[1-9][0-9]*)")
_CONSTANT = re.compile(r"c(-?(?:inf|nan|[0-9].*))")


def _meta(inputs: Sequence[Tensor], program: str) -> Tensor:
    check_program(program, len(inputs))
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in inputs])
    return inputs[0].new_empty(shape, dtype=result_dtype(inputs))


@define("elementwise(Tensor[] inputs, str program) -> Tensor", meta=_meta)
def elementwise(inputs: Sequence[Tensor], program: str) -> Tensor:
    """The value of ``program`` for every element, computed in fp32 and rounded once.

    ``inputs`` are up to ``MAX_INPUTS`` tensors of ``DTYPES``, broadcast against each other; the
    result has torch's result dtype of them and is contiguous. Raises ValueError for a program that
    is not well formed or needs more than ``MAX_DEPTH`` values on its stack.
    """
    output = _meta(inputs, program)
    stack: list[Tensor] = []
    for token in program.split(" "):
        if token in BINARY:
            right = stack.pop()
            stack.append(BINARY[token](stack.pop(), right))
        elif token in UNARY:
            stack.append(UNARY[token](stack.pop()))
        elif token.startswith("i"):
            stack.append(inputs[int(token[1:])].float())
        else:
            stack.append(torch.tensor(float(token[1:]), dtype=torch.float32))
    return output.copy_(stack.pop())


@lru_cache(maxsize=1024)
def check_program(program: str, inputs: int) -> None:
    """Raise ValueError unless ``program`` is well formed for this number of inputs."""
    if not 0 < inputs <= MAX_INPUTS:
        raise ValueError(f"elementwise: {inputs} inputs; it takes 1 to {MAX_INPUTS}")
    depth = 0
    for token in program.split(" "):
        takes = _takes(token, inputs)
        if takes is None:
            raise ValueError(f"elementwise: {token!r} in {program!r:.200} is no token")
        if depth < takes:
            raise ValueError(f"elementwise: {token} finds too few values in {program!r:.200}")
        depth += 1 - takes
        if depth > MAX_DEPTH:
            raise ValueError(f"elementwise: more than {MAX_DEPTH} values in {program!r:.200}")
    if depth != 1:
        raise ValueError(f"elementwise: {program!r:.200} leaves {depth} values, not one")


def result_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    """torch's result dtype of tensors; ValueError when the dtype of one is not in ``DTYPES``.

    Tensors without axes count only when all are: they do not widen the others.
    """
    if any(tensor.dtype not in DTYPES for tensor in inputs):
        raise ValueError(f"elementwise: the dtype of an input is not one of {DTYPES}")
    deciding = [tensor for tensor in inputs if tensor.dim()] or inputs
    return reduce(torch.promote_types, (tensor.dtype for tensor in deciding))


def _takes(token: str, inputs: int) -> int | None:
    """How many values a token takes off the stack; None for no token."""
    if token in BINARY:
        return 2
    if token in UNARY:
        return 1
    pushed = _INPUT.fullmatch(token)
    if pushed:
        return 0 if int(pushed[1]) < inputs else None
    constant: Any = _CONSTANT.fullmatch(token)
    return 0 if constant and _is_float(constant[1]) else None


def _is_float(text: str) -> bool:
    """Whether it is how ``repr`` writes some float."""
    try:
        return repr(float(text)) == text
    except ValueError:
        return False
