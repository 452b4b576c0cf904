# SPDX-License-Identifier: Apache-2.0
"""Adapters that are compiled in: ``lora_config`` of the ahead-of-time API, as optimum-rbln has it.

Imports neither torch nor vLLM.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

BASE_MODEL = 0
"""The id that stands for no adapter."""
BASE_NAME = "base"
"""The name that stands for none, beside None."""


@dataclass(frozen=True)
class RBLNLoRAAdapterConfig:
    """One adapter: ``lora_path`` is a directory that PEFT saved, or a name on Hugging Face's hub.

    What is None comes from the adapter's own ``adapter_config.json``. ``lora_alpha`` and
    ``use_rslora`` may differ from it; ``r`` and ``target_modules`` are those of its weights.
    Raises ValueError for an id, a name or a number that cannot be, NotImplementedError for a bias.
    """

    lora_int_id: int
    lora_name: str
    lora_path: str
    r: int | None = None
    lora_alpha: float | None = None
    target_modules: tuple[str, ...] | str | None = None
    bias: str | None = None
    use_rslora: bool | None = None

    def __post_init__(self) -> None:
        self._check_identity()
        if self.r is not None and (type(self.r) is not int or self.r < 1):
            raise ValueError(f"adapter {self.lora_name!r}: r {self.r!r} must be 1 or more")
        if self.lora_alpha is not None and not is_number(self.lora_alpha):
            raise ValueError(
                f"adapter {self.lora_name!r}: lora_alpha {self.lora_alpha!r} is no number"
            )
        if self.use_rslora not in (None, True, False):
            raise ValueError(
                f"adapter {self.lora_name!r}: use_rslora {self.use_rslora!r} is not true or false"
            )
        targets = self.target_modules
        if not isinstance(targets, str | tuple | None):
            raise ValueError(
                f"adapter {self.lora_name!r}: target_modules {targets!r} are a list of names or a "
                "pattern"
            )
        if self.bias not in (None, "none"):
            raise NotImplementedError(
                f"adapter {self.lora_name!r}: bias {self.bias!r} is not supported: train it with "
                "bias='none'"
            )

    def _check_identity(self) -> None:
        if not (isinstance(self.lora_name, str) and isinstance(self.lora_path, str)):
            raise ValueError(
                f"lora_name {self.lora_name!r} and lora_path {self.lora_path!r} must be texts"
            )
        if not self.lora_name or not self.lora_path:
            raise ValueError(f"adapter {self.lora_int_id}: lora_name and lora_path are needed")
        if type(self.lora_int_id) is not int or self.lora_int_id < BASE_MODEL:
            raise ValueError(f"adapter {self.lora_name!r}: lora_int_id must be 1 or more")
        if self.lora_int_id == BASE_MODEL or self.lora_name == BASE_NAME:
            raise ValueError(
                f"adapter {self.lora_name!r}: lora_int_id 0 and the name {BASE_NAME!r} are the "
                "base model's, which needs no adapter; ids begin with 1"
            )

    @classmethod
    def of(cls, entry: "RBLNLoRAAdapterConfig | Mapping[str, Any]") -> "RBLNLoRAAdapterConfig":
        """ValueError for unknown or missing entries."""
        if isinstance(entry, RBLNLoRAAdapterConfig):
            return entry
        _check_entries("an adapter of lora_config", entry, {field.name for field in fields(cls)})
        missing = [name for name in ("lora_int_id", "lora_name", "lora_path") if name not in entry]
        if missing:
            raise ValueError(f"an adapter of lora_config lacks {', '.join(missing)}")
        targets = entry.get("target_modules")
        if isinstance(targets, Sequence) and not isinstance(targets, str):
            entry = {**entry, "target_modules": tuple(targets)}
        return cls(**entry)


@dataclass(frozen=True)
class RBLNLoRAConfig:
    """The adapters of a compiled model, by their ids, and the rank that all are padded to.

    ``max_lora_rank`` None is the largest of them. Raises ValueError unless ids are unique and
    contiguous from 1 and names unique.
    """

    adapters: tuple[RBLNLoRAAdapterConfig, ...]
    max_lora_rank: int | None = None

    def __post_init__(self) -> None:
        ordered = sorted(map(RBLNLoRAAdapterConfig.of, self.adapters), key=lambda a: a.lora_int_id)
        object.__setattr__(self, "adapters", tuple(ordered))
        if not ordered:
            raise ValueError("lora_config has no adapters: name one, or leave lora_config out")
        ids = [adapter.lora_int_id for adapter in ordered]
        if ids != list(range(1, len(ids) + 1)):
            raise ValueError(
                f"lora_config: lora_int_id must be unique and contiguous from 1, not {ids}"
            )
        names = sorted(adapter.lora_name for adapter in ordered)
        if len(set(names)) != len(names):
            raise ValueError(f"lora_config: lora_name must be unique, not {names}")
        rank = self.max_lora_rank
        if rank is not None and (type(rank) is not int or rank < 1):
            raise ValueError(f"lora_config: max_lora_rank {rank!r} must be 1 or more")

    @classmethod
    def of(cls, entries: "RBLNLoRAConfig | Mapping[str, Any]") -> "RBLNLoRAConfig":
        """From ``{"adapters": [...], "max_lora_rank": R}``; ValueError for unknown entries."""
        if isinstance(entries, RBLNLoRAConfig):
            return entries
        _check_entries("lora_config", entries, {"adapters", "max_lora_rank"})
        adapters = entries.get("adapters") or ()
        if isinstance(adapters, str | Mapping) or not isinstance(adapters, Sequence):
            raise ValueError("lora_config: adapters must be a list")
        return cls(tuple(adapters), entries.get("max_lora_rank"))

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of their ids."""
        return tuple(adapter.lora_name for adapter in self.adapters)

    @property
    def summary(self) -> str:
        """Names, ids and ranks."""
        adapters = [f"{a.lora_name} (id {a.lora_int_id}, rank {a.r})" for a in self.adapters]
        return f"{', '.join(adapters)}; up to rank {self.max_lora_rank}"

    @property
    def arguments(self) -> str:
        """What ``rbln-vllm compile`` is given for them."""
        modules = " ".join(shlex.quote(f"{a.lora_name}={a.lora_path}") for a in self.adapters)
        rank = "" if self.max_lora_rank is None else f" --max-lora-rank {self.max_lora_rank}"
        return f"--lora-modules {modules}{rank}"

    def is_of(self, recorded: "RBLNLoRAConfig") -> bool:
        """Whether a model of ``recorded`` adapters has these; paths need not be there any more."""
        same_rank = self.max_lora_rank in (None, recorded.max_lora_rank)
        return same_rank and self.names == recorded.names

    def to_json(self) -> dict[str, Any]:
        """The inverse of :meth:`of`, for a compiled model's configuration."""
        adapters = [
            {name: value for name, value in asdict(adapter).items() if value is not None}
            for adapter in self.adapters
        ]
        rank = {} if self.max_lora_rank is None else {"max_lora_rank": self.max_lora_rank}
        return {"adapters": adapters, **rank}


def is_number(value: object) -> bool:
    """Whether it is a finite number, and not true or false."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _check_entries(what: str, entries: object, known: set[str]) -> None:
    if not isinstance(entries, Mapping):
        raise ValueError(f"{what}: {entries!r:.80} is no mapping of {', '.join(sorted(known))}")
    unknown = sorted(map(str, entries.keys() - known))
    if unknown:
        raise ValueError(
            f"{what}: {', '.join(unknown)} is unknown; known are {', '.join(sorted(known))}"
        )
