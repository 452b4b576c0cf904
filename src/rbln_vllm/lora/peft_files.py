# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT saves them, read without an engine to be compiled in.

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors``. Nothing is unpickled.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rbln_vllm.lora.config import RBLNLoRAAdapterConfig, RBLNLoRAConfig, is_number
from rbln_vllm.lora.fit import AdapterError, Matrices, check_fit
from rbln_vllm.lora.slots import LowRank
from rbln_vllm.toolchain import Adapters

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8.0, "bias": "none", "use_rslora": False}
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_OF_THE_BASE_MODEL = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
"""PEFT may save these beside an adapter; they are the base model's own."""
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "biases (lora_bias)",
    "modules_to_save": "modules_to_save",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "layer_replication": "layer_replication",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}
_PLAIN_BEGINNINGS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of ``init_lora_weights`` after which the base model's weights are what they were."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter on disk. ``config`` has nothing None but, perhaps, ``target_modules``; patterns
    give single modules another rank or alpha."""

    config: RBLNLoRAAdapterConfig
    directory: Path
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def of(
        cls, config: RBLNLoRAAdapterConfig, download: Callable[[str], Path] | None = None
    ) -> "PeftAdapter":
        """Reads its settings; ``download`` fetches a name on the hub.

        AdapterError for what is no adapter or asks for what programs cannot, NotImplementedError
        for a bias.
        """
        directory = Path(config.lora_path).expanduser()
        if not directory.is_dir():
            if download is None or directory.is_absolute():
                raise AdapterError(
                    f"adapter {config.lora_name!r}: there is no directory {config.lora_path}; give "
                    f"one that holds {CONFIG_FILE} and {WEIGHTS_FILE}"
                )
            directory = download(config.lora_path)
        own = _settings(config.lora_name, directory)
        _check_supported(config.lora_name, own)
        return cls(
            _completed(config, own),
            directory,
            _pattern(config.lora_name, own, "rank_pattern"),
            _pattern(config.lora_name, own, "alpha_pattern"),
        )

    @property
    def name(self) -> str:
        return self.config.lora_name

    @property
    def largest_rank(self) -> int:
        assert self.config.r is not None
        return max(self.config.r, *self.rank_pattern.values(), 0)

    def parts(self, adapters: Adapters) -> dict[str, LowRank]:
        """By module: its matrices in the adapters' dtype, with the scale in ``B``.

        AdapterError unless they fit the model.
        """
        check_fit(self.name, self._matrices, adapters)
        parts = {}
        for module, (a_RK, b_OR) in self._matrices.items():
            assert a_RK is not None
            assert b_OR is not None
            scaled_OR = b_OR.float() * self._scale(module, a_RK.shape[0])
            parts[module] = LowRank(a_RK.to(adapters.dtype), scaled_OR.to(adapters.dtype))
        return parts

    @cached_property
    def _matrices(self) -> dict[str, Matrices]:
        found: dict[str, Matrices] = {}
        for key, tensor in _tensors(self.name, self.directory / WEIGHTS_FILE).items():
            match = _TENSOR.fullmatch(key)
            if match is None or not tensor.is_floating_point():
                if key.endswith(_OF_THE_BASE_MODEL):
                    continue
                raise AdapterError(
                    f"adapter {self.name!r}: {key} ({tensor.dtype}) is no lora_A or lora_B of a "
                    "linear: train it for linears only, as plain LoRA"
                )
            a, b = found.get(match["module"], (None, None))
            found[match["module"]] = (tensor, b) if match["part"] == "A" else (a, tensor)
        return found

    def _scale(self, module: str, rank: int) -> float:
        """PEFT's factor of a module's product; AdapterError for weights of another rank."""
        wanted = _matching(self.rank_pattern, module) or self.config.r
        if rank != wanted:
            raise wrong_rank(self.name, module, rank, wanted)
        alpha = _matching(self.alpha_pattern, module)
        alpha = self.config.lora_alpha if alpha is None else alpha
        assert alpha is not None
        return alpha / (math.sqrt(rank) if self.config.use_rslora else rank)


def check_settings(name: str, directory: Path) -> None:
    """AdapterError for settings that are damaged or ask for what programs cannot, before vLLM,
    which takes their types for granted, reads them."""
    own = _settings(name, directory)
    _check_supported(name, own)
    _pattern(name, own, "rank_pattern")
    _pattern(name, own, "alpha_pattern")
    for key in ("r", "lora_alpha"):
        value = own.get(key)
        if value is not None and not is_number(value):
            raise AdapterError(
                f"adapter {name!r}: {key} {value!r:.80} is no number (in its {CONFIG_FILE})"
            )


def wrong_rank(name: str, module: str, rank: int, wanted: object) -> AdapterError:
    """What is said of weights of another rank than the settings have: the scale would be wrong."""
    return AdapterError(
        f"adapter {name!r}, {module}: its weights have rank {rank}, and its settings "
        f"say {wanted}: save it again, with the settings that it was trained with"
    )


def read_adapters(
    config: RBLNLoRAConfig, download: Callable[[str], Path] | None = None
) -> tuple[tuple[PeftAdapter, ...], RBLNLoRAConfig]:
    """The adapters on disk, in the order of their ids, and ``config`` with nothing left open.

    ValueError for a ``max_lora_rank`` below the largest rank, and as of each adapter.
    """
    adapters = tuple(PeftAdapter.of(adapter, download) for adapter in config.adapters)
    largest = max(adapter.largest_rank for adapter in adapters)
    if config.max_lora_rank is not None and config.max_lora_rank < largest:
        raise ValueError(
            f"lora_config: max_lora_rank {config.max_lora_rank} is below the largest rank "
            f"{largest} of its adapters: raise it (--max-lora-rank)"
        )
    whole = tuple(adapter.config for adapter in adapters)
    return adapters, RBLNLoRAConfig(whole, config.max_lora_rank or largest)


def _settings(name: str, directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise AdapterError(f"adapter {name!r}: {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"adapter {name!r}: {file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise AdapterError(f"adapter {name!r}: {file} holds no settings")
    return found


def _check_supported(name: str, own: Mapping[str, Any]) -> None:
    kind = str(own.get("peft_type", "LORA"))
    if kind.upper() != "LORA":
        raise AdapterError(f"adapter {name!r} is of PEFT's type {kind}: only LORA is supported")
    if unsupported := [what for key, what in _UNSUPPORTED.items() if own.get(key)]:
        raise AdapterError(
            f"adapter {name!r} has {', '.join(unsupported)}, which programs cannot: train it "
            "without, or merge it into the model's weights"
        )
    begun = own.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in _PLAIN_BEGINNINGS:
        raise AdapterError(
            f"adapter {name!r}: init_lora_weights {begun!r} changed the base model's weights: "
            "convert it to plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )


def _completed(config: RBLNLoRAAdapterConfig, own: Mapping[str, Any]) -> RBLNLoRAAdapterConfig:
    """With the adapter's own settings where ``config`` has none."""
    name = config.lora_name
    for key in ("r", "target_modules"):
        given, theirs = getattr(config, key), own.get(key)
        if None not in (given, theirs) and _plain(given) != _plain(theirs):
            raise AdapterError(
                f"adapter {name!r}: {key} {given!r} is not what it was trained with, {theirs!r}: "
                "leave it out"
            )
    settings = {**_DEFAULTS, **{key: value for key, value in own.items() if value is not None}}
    open_fields = [f.name for f in fields(config) if getattr(config, f.name) is None]
    chosen = {key: settings[key] for key in open_fields if key in settings}
    targets = chosen.get("target_modules")
    if isinstance(targets, list):
        chosen["target_modules"] = tuple(sorted(map(str, targets)))
    try:
        return replace(config, **chosen)
    except ValueError as error:
        raise AdapterError(f"{error} (in its {CONFIG_FILE})") from error


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, list | tuple) else value


def _pattern(name: str, own: Mapping[str, Any], key: str) -> dict[str, Any]:
    pattern = own.get(key) or {}
    numbers = isinstance(pattern, dict) and all(
        type(value) in (int, float) and value > 0 for value in pattern.values()
    )
    if not numbers:
        raise AdapterError(f"adapter {name!r}: {key} {pattern!r:.80} holds no positive numbers")
    try:
        for entry in pattern:
            re.compile(entry)
    except re.error as error:
        raise AdapterError(f"adapter {name!r}: {key}: {entry!r} is no pattern: {error}") from error
    return dict(pattern)


def _matching(pattern: Mapping[str, Any], module: str) -> Any:
    """The first entry for a module, found as PEFT finds it: by the end of its name."""
    for entry, value in pattern.items():
        if re.match(rf"(.*\.)?({entry})$", module):
            return value
    return None


def _tensors(name: str, file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise AdapterError(
            f"adapter {name!r}: {file} cannot be read ({error}): save the adapter with PEFT's "
            "save_pretrained, as safetensors"
        ) from error
