# SPDX-License-Identifier: Apache-2.0
"""The compiled module ``rbln_host._native``, as far as the executor uses it."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from rbln_host.errors import ExecutorError


class Pool(Protocol):
    """Threads pinned to CPUs; the caller of a run is the first."""

    @property
    def threads(self) -> int: ...


class Program(Protocol):
    """Checked commands over base regions."""

    def bind(self, base: int, pointer: int, size: int) -> None:
        """ValueError when ``size`` is smaller than the region."""

    def run(self, pool: Any, tokens: int = ...) -> None:
        """Without the GIL; of kernels by token only the first ``tokens`` rows are computed.

        IndexError for an id, position, slot or block that is out of range.
        """


class KVCopier(Protocol):
    """Copies between blocks of one KV pool."""

    def copy(self, pool: Any, copies: Sequence[tuple[int, int, int]]) -> None:
        """Without the GIL; each copy is ``(source, target, tokens)``.

        IndexError for a block, ValueError for tokens that are out of range.
        """


class Extension(Protocol):
    """The module. Its classes check what they are given and raise ValueError."""

    def isa_levels(self) -> list[str]: ...

    def Pool(self, cpus: list[int], spin_us: int) -> Pool: ...  # noqa: N802

    def Tensor(  # noqa: N802
        self, base: int, offset: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> Any: ...

    def Command(  # noqa: N802
        self,
        op: str,
        tensors: Sequence[Any],
        numbers: dict[str, float],
        text: str,
        by_token: bool,
    ) -> Any: ...

    def Program(  # noqa: N802
        self, commands: Sequence[Any], bases: Sequence[int], isa: str
    ) -> Program: ...

    def KVCopier(  # noqa: N802
        self, layers: Sequence[tuple[int, int, int]], blocks: int, block_size: int
    ) -> KVCopier: ...


def load_extension() -> Extension:
    """The module; ExecutorError when it was not built."""
    try:
        return cast(Extension, import_module("rbln_host._native"))
    except ImportError as error:
        raise ExecutorError(
            f"the native executor cannot be loaded ({error}): install a wheel of rbln-vllm, or "
            "build it with `pip install .` and a C++17 compiler. RBLN_HOST_EXECUTOR=reference "
            "runs without it, slowly"
        ) from error


def choose_isa(levels: Sequence[str], wanted: str | None) -> str:
    """The instruction set to use: ``wanted``, else the last (best) of ``levels``.

    ExecutorError when this CPU has not got the one that is wanted.
    """
    if wanted is None:
        return levels[-1]
    if wanted not in levels:
        raise ExecutorError(
            f"the instruction set {wanted!r} was asked for (RBLN_HOST_ISA); this CPU has "
            f"{', '.join(levels)}. Choose one of them, or unset it for the best"
        )
    return wanted
