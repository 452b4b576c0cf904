# SPDX-License-Identifier: Apache-2.0
"""Adapters inside a compiled directory: written when it is compiled, read when it is served.

Each is a file of safetensors, ``adapters/<digest>.safetensors``, with ``<module>.lora_A``
``[r, K]`` and ``<module>.lora_B`` ``[O, r]`` in the model's dtype, the scale in ``B``. The
manifest lists the files with their digests, the linears of the model, and the configuration that
they came from.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rbln_vllm.lora.config import RBLNLoRAConfig
from rbln_vllm.lora.fit import AdapterError, Matrices, check_fit
from rbln_vllm.lora.shape import AdapterShape, modules_from_json
from rbln_vllm.lora.slots import LowRank
from rbln_vllm.toolchain import Adapters, Artifact, ArtifactError, FileEntry, write_attachment

FOLDER = "adapters"
LINEARS = "linears"
"""Where the linears stand in the manifest's ``model``."""
_A, _B = ".lora_A", ".lora_B"


def write_adapters(
    directory: Path, parts_by_id: Mapping[int, Mapping[str, LowRank]]
) -> dict[str, FileEntry]:
    """Write adapters to an artifact's directory; returns its manifest's attachments.

    ``B`` holds the scale. OSError when the disk raises it.
    """
    return {
        _attachment(number): write_attachment(directory, FOLDER, dict(_tensors_of(parts)))
        for number, parts in parts_by_id.items()
    }


def compiled_shape(config: RBLNLoRAConfig, dtype: torch.dtype) -> AdapterShape:
    """What programs are compiled for: all adapters in one batch, in any linear."""
    assert config.max_lora_rank is not None
    return AdapterShape(len(config.adapters), config.max_lora_rank, dtype)


@dataclass(frozen=True)
class StoredAdapters:
    """The adapters of a compiled directory. ``adapters`` are what programs take of them."""

    artifact: Artifact
    config: RBLNLoRAConfig
    adapters: Adapters

    @classmethod
    def of(cls, artifact: Artifact, config: RBLNLoRAConfig, dtype: torch.dtype) -> "StoredAdapters":
        """Reads the manifest only. KeyError, TypeError or ValueError where it says something else
        than ``config``."""
        if config.max_lora_rank is None:
            raise ValueError("the adapters have no rank")
        modules = modules_from_json(artifact.manifest.model[LINEARS])
        found = cls(artifact, config, compiled_shape(config, dtype).adapters(modules))
        missing = {
            _attachment(n) for n in found.ids.values()
        } - artifact.manifest.attachments.keys()
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        return found

    @property
    def ids(self) -> dict[str, int]:
        """Of each adapter, by its name, in their order."""
        return {adapter.lora_name: adapter.lora_int_id for adapter in self.config.adapters}

    @property
    def listed(self) -> str:
        """For messages."""
        return ", ".join(f"{name} ({number})" for name, number in self.ids.items())

    def parts(self, name: str) -> dict[str, LowRank]:
        """By module: what the adapter of this name does there.

        KeyError for an unknown name, AdapterError for a file that does not fit the model.
        """
        try:
            tensors = self.artifact.attachment(_attachment(self.ids[name]))
        except ArtifactError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from error
        matrices = _matrices_of(name, tensors)
        check_fit(name, matrices, self.adapters)
        dtype = self.adapters.dtype
        if other := next((t.dtype for t in tensors.values() if t.dtype != dtype), None):
            raise AdapterError(f"adapter {name!r}: its file holds {other}, not {dtype}")
        return {module: LowRank(*_both(pair)) for module, pair in matrices.items()}


def _attachment(number: int) -> str:
    return f"adapter {number}"


def _tensors_of(parts: Mapping[str, LowRank]) -> Iterator[tuple[str, Tensor]]:
    for module, part in parts.items():
        yield module + _A, part.a_RK
        yield module + _B, part.b_OR


def _matrices_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Matrices]:
    modules = _modules(name, tensors)
    return {m: (tensors.get(m + _A), tensors.get(m + _B)) for m in modules}


def _modules(name: str, keys: Iterable[str]) -> list[str]:
    for key in keys:
        if not key.endswith((_A, _B)):
            raise AdapterError(f"adapter {name!r}: its file has a tensor {key!r:.80}")
    return sorted({key.removesuffix(_A).removesuffix(_B) for key in keys})


def _both(pair: Matrices) -> tuple[Tensor, Tensor]:
    a_RK, b_OR = pair
    assert a_RK is not None
    assert b_OR is not None
    return a_RK, b_OR
