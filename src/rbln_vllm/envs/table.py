# SPDX-License-Identifier: Apache-2.0
"""The environment variables there are, one row each."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rbln_vllm.envs import vendor_rows
from rbln_vllm.envs.parsers import (
    parse_bool,
    parse_count,
    parse_executor,
    parse_gib,
    parse_isa,
    parse_optional_text,
    parse_text,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    `no_effect` says why setting it changes nothing yet; `field` names the option that replaces a
    deprecated variable.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    doc: str
    no_effect: str = ""
    field: str = ""

    def __post_init__(self) -> None:
        if not self.name.isupper() and not self.name.startswith("_"):
            raise ValueError(f"{self.name!r} is not an environment variable name")
        if self.no_effect and self.field:
            raise ValueError(f"{self.name} is either deprecated or without effect, not both")

    @property
    def is_set(self) -> bool:
        return self.name in os.environ

    def get(self) -> T:
        """The parsed value, or the default when unset. ValueError names the variable."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"environment variable {self.name}={text!r}: {error}") from error


def _deprecated(name: str, parse: Callable[[str], Any], field: str) -> Variable[Any]:
    return Variable(name, parse, None, "Deprecated, removed in 0.14.0.", field=field)


def _inert(name: str, doc: str, why: str) -> Variable[str | None]:
    return Variable(name, parse_optional_text, None, doc, no_effect=why)


ENABLE_WARM_UP = Variable(
    "VLLM_RBLN_ENABLE_WARM_UP",
    parse_bool,
    True,
    "Compile and warm up every program at start. Off: programs compile when first needed.",
)
COMPILE_ONLY = Variable(
    "VLLM_RBLN_COMPILE_ONLY", parse_bool, False, "Compile, write the cache, exit 0."
)
NUM_HIDDEN_LAYERS = Variable(
    "VLLM_RBLN_NUM_HIDDEN_LAYERS",
    parse_count,
    0,
    "Build only the first N decoder layers (bring-up; part of the cache key). 0 = all.",
)
FORCE_NPU_NAME = Variable(
    "RBLN_FORCE_NPU_NAME",
    parse_optional_text,
    None,
    "Dry run of this device: its limits, defaults and refusals apply, the CPU executes.",
)
TARGET_SOC = Variable(
    "RBLN_TARGET_SOC",
    parse_optional_text,
    None,
    "Older name of `RBLN_FORCE_NPU_NAME`, read when that one is unset.",
)
HOST_EXECUTOR = Variable(
    "RBLN_HOST_EXECUTOR",
    parse_executor,
    "native",
    "Which executor runs programs on HOST: `native` (our kernels) or `reference` (torch's CPU "
    "operators, one command at a time: slow, for comparison).",
)
HOST_ISA = Variable[str | None](
    "RBLN_HOST_ISA",
    parse_isa,
    None,
    "Instruction set of the native kernels: `portable`, `avx2`, `avx512` or `avx512_bf16`, which "
    "this CPU must have. Unset: its best.",
)
HOST_SPIN_US = Variable(
    "RBLN_HOST_SPIN_US",
    parse_count,
    20,
    "Microseconds that an idle thread of the native executor waits awake before it sleeps.",
)
GRAMMAR_SECONDS = Variable(
    "RBLN_GRAMMAR_SECONDS",
    parse_count,
    10,
    "Seconds that the grammar of a structured output may take to compile before its request is "
    "answered with 400. 0 = grammars are not compiled before the engine has them.",
)
CACHE_ROOT = Variable(
    "VLLM_CACHE_ROOT",
    parse_optional_text,
    None,
    "vLLM's cache root; programs are cached below `rbln/`. Default `~/.cache/vllm`.",
)
XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME",
    parse_optional_text,
    None,
    "Where user caches live when `VLLM_CACHE_ROOT` is unset. Default `~/.cache`.",
)
DISABLE_COMPILE_CACHE = Variable(
    "VLLM_DISABLE_COMPILE_CACHE", parse_bool, False, "Neither read nor write the program cache."
)
KV_CACHE_SPACE = Variable(
    "VLLM_CPU_KVCACHE_SPACE",
    parse_gib,
    None,
    "Size of the KV cache in GiB (fractions allowed), instead of a share of free memory.",
)
PUBLISHED_IMPL = Variable(
    "_VLLM_RBLN_RESOLVED_MODEL_IMPL",
    parse_text,
    "",
    "Internal: the implementation a parent process resolved. Written by the plugin, not by users.",
)
OMP_WAIT_POLICY = Variable(
    "OMP_WAIT_POLICY",
    parse_text,
    "PASSIVE",
    "Whether idle OpenMP threads sleep (`PASSIVE`) or spin; set for child processes when unset.",
)
START_METHOD = Variable(
    "VLLM_WORKER_MULTIPROC_METHOD",
    parse_optional_text,
    None,
    "How engine processes start: `fork` or `spawn`. Unset: forked by `LLM(...)` where nothing "
    "stands against it (6 s faster), else spawned, as `vllm serve` always does.",
)
VISIBLE_DEVICES = Variable(
    "RBLN_VISIBLE_DEVICES",
    parse_text,
    "",
    "Which NPUs this process may use, for example `0,1`.",
    no_effect="no effect on HOST: the machine's CPU is the one device",
)
DEVICES = Variable(
    "RBLN_DEVICES",
    parse_text,
    "",
    "Deprecated name of `RBLN_VISIBLE_DEVICES`: removed from the environment and folded into it.",
)
USE_VLLM_MODEL = Variable[bool | None](
    "VLLM_RBLN_USE_VLLM_MODEL",
    parse_bool,
    None,
    "Deprecated, removed in 0.14.0: use `--model-impl vllm` or `--model-impl optimum`.",
)

ACTIVE: tuple[Variable[Any], ...] = (
    ENABLE_WARM_UP,
    COMPILE_ONLY,
    NUM_HIDDEN_LAYERS,
    FORCE_NPU_NAME,
    TARGET_SOC,
    HOST_EXECUTOR,
    HOST_ISA,
    HOST_SPIN_US,
    GRAMMAR_SECONDS,
    CACHE_ROOT,
    XDG_CACHE_HOME,
    DISABLE_COMPILE_CACHE,
    KV_CACHE_SPACE,
    OMP_WAIT_POLICY,
    START_METHOD,
    DEVICES,
    USE_VLLM_MODEL,
    PUBLISHED_IMPL,
)

INERT: tuple[Variable[Any], ...] = (
    VISIBLE_DEVICES,
    *(_inert(*row) for row in vendor_rows.INERT),
)

# Where two variables replace the same field, the first one that is set wins.
DEPRECATED: tuple[Variable[Any], ...] = tuple(
    _deprecated(name, parse, field) for name, parse, field in vendor_rows.DEPRECATED
)

REGISTRY: tuple[Variable[Any], ...] = ACTIVE + INERT + DEPRECATED
