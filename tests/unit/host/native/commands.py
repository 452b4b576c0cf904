# SPDX-License-Identifier: Apache-2.0
"""A valid command of each operator, described without memory, to be spoilt in every way."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rbln_host import _native

ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}
F32, I32, I64 = "float32", "int32", "int64"
OUTPUTS = {
    "linear": (4,),
    "gated_linear": (3,),
    "gated_activation": (1,),
    "rms_norm": (2,),
    "add_rms_norm": (3, 4),
    "layer_norm": (3,),
    "rotary": (3,),
    "rotary_write_kv": (5, 7),
    "write_kv": (2,),
    "paged_attention": (6,),
    "encoder_attention": (4,),
    "embedding": (2,),
    "elementwise": (-1,),
    "copy": (1,),
    "argmax": (1,),
    "mask_tokens": (1,),
    "sample": (7, 8),
    "route": (1, 2),
    "gated_experts": (4,),
    "combine_experts": (5,),
    "lora_shrink": (-1,),
    "lora_linear": (-1,),
    "lora_gated_linear": (-1,),
}
"""Which tensors of a command it writes."""


@dataclass(frozen=True)
class Spec:
    """An operand, contiguous unless ``strides`` are given, in a base region of its own."""

    shape: tuple[int, ...]
    dtype: str = F32
    strides: tuple[int, ...] | None = None
    offset: int = 0
    base: int | None = None

    def all_strides(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def extent(self) -> int:
        """Bytes from the first element to the end of the last; negative strides count as 0."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.all_strides(), strict=False)
        last = sum(max(0, size - 1) * max(0, stride) for size, stride in steps)
        return (last + 1) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class CommandSpec:
    """A command as data."""

    op: str
    tensors: tuple[Spec | None, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    by_token: bool = False

    def with_tensor(self, index: int, spec: Spec | None) -> "CommandSpec":
        tensors = list(self.tensors)
        tensors[index] = spec
        return replace(self, tensors=tuple(tensors))

    def command(self) -> _native.Command:
        operands = [
            None
            if spec is None
            else _native.Tensor(
                index if spec.base is None else spec.base,
                spec.offset,
                spec.dtype,
                list(spec.shape),
                list(spec.all_strides()),
            )
            for index, spec in enumerate(self.tensors)
        ]
        return _native.Command(self.op, operands, dict(self.numbers), self.text, self.by_token)

    def bases(self) -> list[int]:
        """Just large enough for contiguous operands at offset 0."""
        return [0 if spec is None else spec.extent() for spec in self.tensors]

    def program(self, isa: str = "portable", bases: Sequence[int] | None = None) -> _native.Program:
        """ValueError when it is not valid."""
        sizes = self.bases() if bases is None else list(bases)
        return _native.Program([self.command()], sizes, isa)


_POOL = Spec((4, 2, 8, 32))
_PARTS = {"modules.0": 0, "modules.1": 3, "starts.0": 0}
VALID = {
    spec.op: spec
    for spec in (
        CommandSpec(
            "linear",
            (Spec((3, 5)), Spec((2, 5, 16)), Spec((20,)), Spec((3, 20)), Spec((3, 20))),
            text="silu",
        ),
        CommandSpec(
            "gated_linear",
            (Spec((3, 5)), Spec((4, 5, 16)), Spec((64,)), Spec((3, 32))),
            text="gelu",
        ),
        CommandSpec("gated_activation", (Spec((2, 3, 10)), Spec((2, 3, 5))), text="silu"),
        CommandSpec(
            "rms_norm",
            (Spec((3, 6)), Spec((6,)), Spec((3, 6))),
            {"epsilon": 1e-5, "variance_size": 0},
        ),
        CommandSpec(
            "add_rms_norm",
            (Spec((3, 6)), Spec((3, 6)), Spec((6,)), Spec((3, 6)), Spec((3, 6))),
            {"epsilon": 1e-5, "variance_size": 4},
        ),
        CommandSpec(
            "layer_norm",
            (Spec((3, 6)), Spec((6,)), Spec((6,)), Spec((3, 6))),
            {"epsilon": 1e-5},
        ),
        CommandSpec(
            "rotary",
            (Spec((3, 2, 16)), Spec((3,), I64), Spec((9, 8)), Spec((3, 2, 16))),
            {"neox": 1},
        ),
        CommandSpec(
            "rotary_write_kv",
            (
                Spec((3, 4, 16)),
                Spec((3, 2, 16)),
                Spec((3, 2, 16)),
                Spec((3,), I64),
                Spec((9, 8)),
                _POOL,
                Spec((3,), I32),
                Spec((3, 4, 16)),
            ),
            {"neox": 0},
        ),
        CommandSpec("write_kv", (Spec((3, 2, 16)), Spec((3, 2, 16)), _POOL, Spec((3,), I64))),
        CommandSpec(
            "paged_attention",
            (
                Spec((6, 4, 16)),
                _POOL,
                Spec((3, 2), I32),
                Spec((6,), I32),
                Spec((4,)),
                Spec((4,)),
                Spec((6, 4, 16)),
            ),
            {"scale": 0.25, "window": 0, "soft_cap": 0},
        ),
        CommandSpec(
            "encoder_attention",
            (
                Spec((6, 4, 16)),
                Spec((6, 2, 16)),
                Spec((6, 2, 16)),
                Spec((3,), I32),
                Spec((6, 4, 16)),
            ),
            {"scale": 0.25},
        ),
        CommandSpec(
            "embedding",
            (Spec((7, 5)), Spec((3,), I32), Spec((3, 5))),
            {"packed": 0, "rows": 7, "width": 5},
        ),
        CommandSpec("elementwise", (Spec((3, 5)), Spec((3, 5)), Spec((3, 5))), text="i0 i1 add"),
        CommandSpec("copy", (Spec((3, 5)), Spec((3, 5), I32))),
        CommandSpec("argmax", (Spec((3, 5)), Spec((3,), I64))),
        CommandSpec("mask_tokens", (Spec((3, 2), I32), Spec((3, 40)))),
        CommandSpec(
            "sample",
            (
                Spec((3, 40)),
                *(Spec((3,), dtype) for dtype in (F32, I32, F32, I64, I64)),
                Spec((3, 2), I32),
                Spec((3,), I64),
                Spec((3,)),
            ),
        ),
        CommandSpec("route", (Spec((3, 8)), Spec((3, 2)), Spec((3, 2), I64)), {"renormalise": 1}),
        CommandSpec(
            "gated_experts",
            (Spec((3, 5)), Spec((6, 4, 5, 16)), Spec((6, 64)), Spec((3, 2), I64), Spec((3, 2, 32))),
            {"limit": 7, "offset": 1},
            text="silu",
        ),
        CommandSpec(
            "combine_experts",
            (
                Spec((3, 2, 5)),
                Spec((6, 2, 5, 16)),
                Spec((6, 20)),
                Spec((3, 2), I64),
                Spec((3, 2)),
                Spec((3, 20)),
            ),
        ),
        CommandSpec(
            "lora_shrink",
            (
                Spec((3, 5)),
                Spec((3,), I32),
                Spec((4, 2), I32),
                Spec((2, 8, 5)),
                Spec((2, 8, 5)),
                Spec((3, 16)),
            ),
            {"parts": 2, "modules.0": 0, "modules.1": 3},
        ),
        CommandSpec(
            "lora_linear",
            (
                *(Spec((3, 5)), Spec((2, 5, 16)), Spec((20,)), Spec((3, 20))),
                *(Spec((3, 16)), Spec((3,), I64), Spec((4, 2), I32)),
                *(Spec((2, 1, 8, 16)), Spec((2, 1, 8, 16)), Spec((3, 20))),
            ),
            {"parts": 2, **_PARTS, "starts.1": 12, "sizes.0": 12, "sizes.1": 8},
            text="silu",
        ),
        CommandSpec(
            "lora_gated_linear",
            (
                *(Spec((3, 5)), Spec((4, 5, 16)), Spec((64,))),
                *(Spec((3, 16)), Spec((3,), I32), Spec((4, 2), I64)),
                *(Spec((2, 2, 8, 16)), Spec((2, 2, 8, 16)), Spec((3, 32))),
            ),
            {"parts": 2, **_PARTS, "starts.1": 32, "sizes.0": 32, "sizes.1": 32},
            text="gelu",
        ),
    )
}
