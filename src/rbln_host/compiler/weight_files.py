# SPDX-License-Identifier: Apache-2.0
"""Files of weights: safetensors whose tensors start at cache lines.

The format allows no gaps, so gaps are tensors themselves, called ``.gap<n>``. Tensors are made,
written and dropped one by one: writing a model needs memory for one weight beside it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rbln_host.compiler.files import replacing
from rbln_host.compiler.graph import TensorSpec
from rbln_host.compiler.weights import ALIGNMENT, raw_bytes
from rbln_host.errors import ArtifactError

_GAP = ".gap"
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_READ_ERRORS = (OSError, SafetensorError, RuntimeError, ValueError, TypeError, AttributeError)
"""What reading a forged file may raise: the reader's own refusals, and torch's of the tensor."""


@dataclass(frozen=True)
class Pending:
    """A tensor to be written: what it will be, and how to make it."""

    key: str
    spec: TensorSpec
    make: Callable[[], Tensor]

    def __post_init__(self) -> None:
        if self.spec.dtype not in _DTYPE_NAMES:
            raise ValueError(f"a weight file cannot hold {self.spec.dtype}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize


def write_weight_file(path: Path, items: Sequence[Pending]) -> None:
    """Write the tensors to a new file, which replaces ``path``. Raises OSError when the disk
    does."""
    header = _header(items)
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for item in items:
            file.write(raw_bytes(item.make()))
            file.write(bytes(-item.nbytes % ALIGNMENT))


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file by key, memory-mapped. ArtifactError when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.startswith(_GAP)]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    except _READ_ERRORS as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error


def _header(items: Sequence[Pending]) -> bytes:
    """Names, dtypes, shapes and places, padded so that the first tensor is aligned."""
    text = json.dumps(dict(_entries(items)), separators=(",", ":")).encode()
    return text + b" " * (-(len(text) + 8) % ALIGNMENT)


def _entries(items: Sequence[Pending]) -> Iterator[tuple[str, Mapping[str, object]]]:
    place = 0
    for number, item in enumerate(items):
        end = place + item.nbytes
        yield item.key, _entry(_DTYPE_NAMES[item.spec.dtype], item.spec.shape, place, end)
        place = end + -end % ALIGNMENT
        if place > end:
            yield f"{_GAP}{number}", _entry("U8", (place - end,), end, place)


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> Mapping[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
