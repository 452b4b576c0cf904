# SPDX-License-Identifier: Apache-2.0
"""The native executor, C++ in src/rbln_host/native.

A program is a list of commands on tensors that lie at fixed offsets of numbered base regions; it is
checked whole when it is constructed, and runs once each region is bound to memory.
"""

from collections.abc import Sequence

def isa_levels() -> list[str]:
    """Instruction sets that this module was built for and this CPU has, worst to best.

    Of `portable`, `avx2`, `avx512` and `avx512_bf16`.
    """

class Pool:
    """Threads that run programs: one for each CPU of `cpus`, pinned to it; the caller is the first.

    Idle threads spin for `spin_us` microseconds, then sleep.
    """

    def __init__(self, cpus: Sequence[int], spin_us: int = 20) -> None: ...
    @property
    def threads(self) -> int: ...

class Tensor:
    """A view of one base region: `offset` in bytes, `strides` in elements.

    `dtype` is one of `bfloat16`, `float16`, `float32`, `int32`, `int64`.
    """

    def __init__(
        self, base: int, offset: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> None: ...

class Command:
    """One operator: its tensors in the operator's order, outputs last, `None` for an absent one."""

    def __init__(
        self,
        op: str,
        tensors: Sequence[Tensor | None],
        numbers: dict[str, float] = ...,
        text: str = "",
        by_token: bool = False,
    ) -> None:
        """`by_token`: axis 0 of its rows are the program's tokens, see `Program.run`."""

class Program:
    """Commands checked against each other, with kernels of one instruction set.

    `bases` are the sizes of the base regions in bytes.

    Raises:
        ValueError: a shape, dtype, stride or extent does not fit, as in `linear: ...`.
    """

    def __init__(self, commands: Sequence[Command], bases: Sequence[int], isa: str) -> None: ...
    def bind(self, base: int, pointer: int, size: int) -> None:
        """Let region `base` be the `size` bytes at address `pointer`, which must stay alive.

        Raises:
            ValueError: there is no such region, or `size` is less than was declared for it.
        """

    def run(self, pool: Pool, tokens: int = ...) -> None:
        """Run all commands, without the GIL; those by token compute their first `tokens` rows only.

        Raises:
            IndexError: a token id, slot, block or position is out of range.
            MemoryError: there is no memory for a command's work list.
        """

class KVCopier:
    """Copies between the blocks of a KV pool.

    A layer is `(address, heads, bytes of one token of a head)` of a contiguous
    `[blocks, heads, block_size, ...]`; its memory must stay alive.

    Raises:
        ValueError: a size that is not positive, or a layer without memory.
    """

    def __init__(
        self, layers: Sequence[tuple[int, int, int]], blocks: int, block_size: int
    ) -> None: ...
    def copy(self, pool: Pool, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first `tokens` tokens of every head, `(source, target, tokens)`, in order.

        Without the GIL; large copies use all threads.

        Raises, before anything is copied:
            IndexError: there is no such block.
            ValueError: tokens outside 1 to `block_size`.
        """
