# SPDX-License-Identifier: Apache-2.0
"""Adapters that are compiled in: ``rbln_lora_config`` of the ahead-of-time API.

``optimum_overrides.lora_config`` takes the same. Imports neither torch nor vLLM.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BASE_MODEL = 0
"""The id that stands for no adapter."""
_CONFIG_FILE = "adapter_config.json"
_DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8.0, "bias": "none", "use_rslora": False}


@dataclass(frozen=True)
class AdapterConfig:
    """One adapter: ``lora_path`` is a directory, or a hub id.

    What is None comes from the adapter's own ``adapter_config.json``, see :meth:`resolved`.
    Raises ValueError for an id or a rank that cannot be, NotImplementedError for a bias.
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
        if self.lora_int_id == BASE_MODEL:
            raise ValueError(
                f"adapter {self.lora_name!r}: lora_int_id 0 is the base model's, which needs no "
                "adapter; ids begin with 1"
            )
        if self.lora_int_id < 0:
            raise ValueError(f"adapter {self.lora_name!r}: lora_int_id must be 1 or more")
        if not self.lora_name or not self.lora_path:
            raise ValueError(f"adapter {self.lora_int_id}: lora_name and lora_path are needed")
        if self.r is not None and self.r < 1:
            raise ValueError(f"adapter {self.lora_name!r}: r {self.r} must be 1 or more")
        if self.bias not in (None, "none"):
            raise NotImplementedError(
                f"adapter {self.lora_name!r}: bias {self.bias!r} is not supported: train it with "
                "bias='none'"
            )

    @classmethod
    def of(cls, entry: "AdapterConfig | Mapping[str, Any]") -> "AdapterConfig":
        """ValueError for unknown or missing entries."""
        if isinstance(entry, AdapterConfig):
            return entry
        known = {field.name for field in fields(cls)}
        _check_entries("an adapter of lora_config", entry, known)
        missing = sorted({"lora_int_id", "lora_name", "lora_path"} - entry.keys())
        if missing:
            raise ValueError(f"an adapter of lora_config lacks {', '.join(missing)}")
        targets = entry.get("target_modules")
        if isinstance(targets, Sequence) and not isinstance(targets, str):
            entry = {**entry, "target_modules": tuple(targets)}
        return cls(**entry)

    def resolved(self, download: Callable[[str], str] | None = None) -> "AdapterConfig":
        """The same with a directory for its path and nothing None.

        ``download`` fetches a hub id. Raises ValueError when the path is no adapter.
        """
        directory = Path(self.lora_path).expanduser()
        if not directory.is_dir():
            if download is None:
                raise ValueError(
                    f"adapter {self.lora_name!r}: {self.lora_path} is no directory; give one that "
                    f"holds {_CONFIG_FILE}"
                )
            directory = Path(download(self.lora_path))
        own = self._read(directory)
        chosen = {
            name: own.get(name, default) if getattr(self, name) is None else getattr(self, name)
            for name, default in {**_DEFAULTS, "target_modules": None}.items()
        }
        given = {"lora_int_id": self.lora_int_id, "lora_name": self.lora_name}
        return AdapterConfig.of({**given, "lora_path": str(directory), **chosen})

    def _read(self, directory: Path) -> dict[str, Any]:
        try:
            found = json.loads((directory / _CONFIG_FILE).read_text())
        except FileNotFoundError as error:
            raise ValueError(
                f"adapter {self.lora_name!r}: {directory} has no {_CONFIG_FILE}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"adapter {self.lora_name!r}: {directory / _CONFIG_FILE} is no JSON: {error}"
            ) from error
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class LoraConfig:
    """The adapters of a compiled model, and the rank that all are padded to.

    Raises ValueError unless ids are unique and contiguous from 1 and names unique.
    """

    adapters: tuple[AdapterConfig, ...]
    max_lora_rank: int | None = None

    def __post_init__(self) -> None:
        if not self.adapters:
            raise ValueError("lora_config has no adapters: name one, or leave lora_config out")
        ids = sorted(adapter.lora_int_id for adapter in self.adapters)
        if ids != list(range(1, len(ids) + 1)):
            raise ValueError(
                f"lora_config: lora_int_id must be unique and contiguous from 1, not {ids}"
            )
        names = [adapter.lora_name for adapter in self.adapters]
        if len(set(names)) != len(names):
            raise ValueError(f"lora_config: lora_name must be unique, not {sorted(names)}")
        if self.max_lora_rank is not None and self.max_lora_rank < 1:
            raise ValueError(f"lora_config: max_lora_rank {self.max_lora_rank} must be 1 or more")

    @classmethod
    def of(cls, entries: "LoraConfig | Mapping[str, Any]") -> "LoraConfig":
        """From ``{"adapters": [...], "max_lora_rank": R}``; ValueError for unknown entries."""
        if isinstance(entries, LoraConfig):
            return entries
        _check_entries("lora_config", entries, {"adapters", "max_lora_rank"})
        adapters = tuple(AdapterConfig.of(entry) for entry in entries.get("adapters") or ())
        return cls(adapters, entries.get("max_lora_rank"))

    def resolved(self, download: Callable[[str], str] | None = None) -> "LoraConfig":
        """With every adapter resolved, in the order of their ids, and a rank for all.

        ValueError for a ``max_lora_rank`` below the largest rank, and as each adapter's.
        """
        adapters = sorted(
            (adapter.resolved(download) for adapter in self.adapters),
            key=lambda adapter: adapter.lora_int_id,
        )
        largest = max(adapter.r or 0 for adapter in adapters)
        if self.max_lora_rank is not None and self.max_lora_rank < largest:
            raise ValueError(
                f"lora_config: max_lora_rank {self.max_lora_rank} is below the largest rank "
                f"{largest} of its adapters: raise it"
            )
        return LoraConfig(tuple(adapters), self.max_lora_rank or largest)

    @property
    def ids(self) -> frozenset[int]:
        """The ids that requests may name, beside 0."""
        return frozenset(adapter.lora_int_id for adapter in self.adapters)

    def to_json(self) -> dict[str, Any]:
        """The inverse of :meth:`of`, for a compiled model's configuration."""
        adapters = [
            {
                field.name: value
                for field in fields(adapter)
                if (value := getattr(adapter, field.name)) is not None
            }
            for adapter in self.adapters
        ]
        rank = {} if self.max_lora_rank is None else {"max_lora_rank": self.max_lora_rank}
        return {"adapters": adapters, **rank}


def _check_entries(what: str, entries: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(entries) - known)
    if unknown:
        raise ValueError(
            f"{what}: {', '.join(unknown)} is unknown; known are {', '.join(sorted(known))}"
        )
