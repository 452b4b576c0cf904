# SPDX-License-Identifier: Apache-2.0
"""Random commands, most of them spoilt, over memory that ends where pages that cannot be touched
begin: a program refuses to be built, or runs and stays inside its bases.

Run as a module with a seed and a number of cases; a crash names its case on the last line before
it. Writes how many cases ran as JSON.
"""

import ctypes
import json
import math
import mmap
import sys
from collections import Counter
from dataclasses import replace

import numpy as np

from rbln_host import _native
from tests.unit.host.native.commands import ITEM_SIZE, CommandSpec, Spec
from tests.unit.host.native.random_commands import FLOATS, INTEGERS, Random, random_command

PAGE = mmap.PAGESIZE
REGION = 16 * PAGE
UNTOUCHED = 0xA5
REGIONS = 12


class Region:
    """Memory between two pages that cannot be touched. Operands lie at its end or its start."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, REGION + 2 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (address, address + PAGE + REGION):
            if libc.mprotect(ctypes.c_void_p(page), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._address = address + PAGE
        self._bytes = np.frombuffer(self._map, np.uint8, REGION, PAGE)
        self._used = slice(0, 0)

    def place(self, content: bytes, at_end: bool) -> int:
        """Address of a copy of the bytes; the rest of the region is set to a pattern."""
        start = REGION - len(content) if at_end else 0
        self._used = slice(start, start + len(content))
        self._bytes[:] = UNTOUCHED
        self._bytes[self._used] = np.frombuffer(content, np.uint8)
        return self._address + start

    def is_untouched(self) -> bool:
        """Whether nothing beside the bytes has changed."""
        around = (self._bytes[: self._used.start], self._bytes[self._used.stop :])
        return all((part == UNTOUCHED).all() for part in around)


SIZES = (-1, 0, 1, 2, 3, 15, 16, 17, 64, 1000, 1 << 31, 1 << 40, (1 << 63) - 1)


def spoil_tensor(rng: Random, spec: Spec) -> Spec | None:
    """Another dtype, size, stride, offset, number of axes, base, or none at all."""
    shape, strides = list(spec.shape), list(spec.all_strides())
    axis = rng.randrange(len(shape)) if shape else None
    kind = rng.choice(
        ("dtype", "near", "near", "size", "stride", "stride", "offset", "axes", "base")
    )
    if kind == "near" and axis is not None:
        shape[axis] = max(0, min(shape[axis], 1 << 40) + rng.choice((-1, 1, 1, 16)))
    elif kind == "size" and axis is not None:
        shape[axis] = rng.choice(SIZES)
    elif kind == "stride" and axis is not None and strides:
        near = min(strides[0], 99)
        strides[min(axis, len(strides) - 1)] = rng.choice((*SIZES, near + 1, max(0, near - 1)))
    elif kind == "axes" and rng.random() < 0.5:
        shape, strides = [1, *shape], [1, *strides]
    elif kind == "axes":
        shape, strides = shape[1:], strides[1:]
    spec = replace(spec, shape=tuple(shape), strides=tuple(strides))
    if kind == "dtype":
        return replace(spec, dtype=rng.choice((*FLOATS, *INTEGERS)))
    if kind == "offset":
        return replace(spec, offset=rng.choice((-8, -1, 1, 2, 4, 8, 64, 1 << 40, -(1 << 62))))
    if kind == "base":
        return None if rng.random() < 0.5 else replace(spec, base=rng.choice((-1, 10, 1 << 30)))
    return spec


def spoil(rng: Random, command: CommandSpec) -> CommandSpec:
    """The command with one thing changed."""
    kind = rng.random()
    if kind < 0.7 and command.tensors:
        index = rng.randrange(len(command.tensors))
        spec = command.tensors[index] or Spec((rng.choice((1, 16)),), rng.choice(FLOATS))
        return command.with_tensor(index, spoil_tensor(rng, spec))
    if kind < 0.8 and command.numbers:
        name = rng.choice(sorted(command.numbers))
        value = rng.choice((-1.0, 0.0, 0.5, 1.0, 2.0, 17.0, 1e30, math.nan, math.inf))
        return replace(command, numbers={**command.numbers, name: value})
    if kind < 0.85:
        return replace(command, tensors=command.tensors[:-1])
    if kind < 0.9:
        text = rng.choice(("", "silu", "i0", "i0 i1 add", "c1.0", "i7 neg", "x" * 100))
        return replace(command, text=text)
    other = random_command(rng)
    return replace(command, op=other.op, numbers={**other.numbers, **command.numbers})


def content_of(rng: np.random.Generator, spec: Spec, size: int) -> bytes:
    """Numbers of the operand's dtype; most integers are small."""
    count = size // ITEM_SIZE[spec.dtype]
    if spec.dtype in INTEGERS:
        values = rng.integers(-1, 9, count)
        huge = rng.random(count) < 0.01
        values[huge] = rng.integers(-(1 << 31), 1 << 31, int(huge.sum()))
        content = values.astype(spec.dtype).tobytes()
    elif spec.dtype == "bfloat16":
        content = (
            (rng.standard_normal(count, np.float32).view(np.uint32) >> 16)
            .astype(np.uint16)
            .tobytes()
        )
    else:
        content = rng.standard_normal(count, np.float32).astype(spec.dtype).tobytes()
    return content.ljust(size, b"\0")


class Fuzzer:
    """Runs one case after another in the same regions."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._regions = [Region() for _ in range(REGIONS)]
        self._pool = _native.Pool([0])
        self._levels = _native.isa_levels()
        self.outcomes: Counter[str] = Counter()

    def run(self, case: int) -> None:
        rng = Random(f"{self._seed} {case}")
        command = replace(random_command(rng), by_token=rng.random() < 0.3)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            command = spoil(rng, command)
        sizes = [min(REGION, self._size(spec)) for spec in command.tensors]
        try:
            program = command.program(rng.choice(self._levels), sizes)
        except ValueError as error:
            named = str(error).startswith(f"{command.op}: ")
            self.outcomes["refused" if named else f"refused without a name: {error}"] += 1
            return
        self._bind(program, command, sizes, case, at_end=rng.random() < 0.7)
        try:
            program.run(self._pool, rng.choice((0, 1, 3, 16, (1 << 63) - 1)))
            self.outcomes[f"ran {command.op}"] += 1
        except IndexError:
            self.outcomes["out of range"] += 1
        if not all(region.is_untouched() for region in self._regions[: len(sizes)]):
            raise AssertionError(f"case {case} wrote outside: {command}")

    @staticmethod
    def _size(spec: Spec | None) -> int:
        """Bytes of the base: to the operand's end, were its offset not negative."""
        return 0 if spec is None else spec.extent() + min(max(0, spec.offset), REGION)

    def _bind(
        self,
        program: _native.Program,
        command: CommandSpec,
        sizes: list[int],
        case: int,
        at_end: bool,
    ) -> None:
        rng = np.random.default_rng([self._seed, case])
        for base, (spec, size) in enumerate(zip(command.tensors, sizes, strict=True)):
            content = b"" if spec is None else content_of(rng, spec, size)
            program.bind(base, self._regions[base].place(content, at_end), size)


def main() -> None:
    seed, first, end = map(int, sys.argv[1:])
    fuzzer = Fuzzer(seed)
    for case in range(first, end):
        sys.stderr.write(f"\rcase {case}")
        fuzzer.run(case)
    print(json.dumps(fuzzer.outcomes))


if __name__ == "__main__":
    main()
