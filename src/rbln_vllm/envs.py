# SPDX-License-Identifier: Apache-2.0
"""The one registry of environment variables: no other module reads the environment.

Every row is read when asked, so a test may set `os.environ` at any time. What is written for
child processes (`publish_model_impl`, `fold_device_pool`) lives here too.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rbln_vllm import env_tables
from rbln_vllm.env_parsers import (
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


_ENABLE_WARM_UP = Variable(
    "VLLM_RBLN_ENABLE_WARM_UP",
    parse_bool,
    True,
    "Compile and warm up every program at start. Off: programs compile when first needed.",
)
_COMPILE_ONLY = Variable(
    "VLLM_RBLN_COMPILE_ONLY", parse_bool, False, "Compile, write the cache, exit 0."
)
_NUM_HIDDEN_LAYERS = Variable(
    "VLLM_RBLN_NUM_HIDDEN_LAYERS",
    parse_count,
    0,
    "Build only the first N decoder layers (bring-up; part of the cache key). 0 = all.",
)
_FORCE_NPU_NAME = Variable(
    "RBLN_FORCE_NPU_NAME",
    parse_optional_text,
    None,
    "Dry run of this device: its limits, defaults and refusals apply, the CPU executes.",
)
_TARGET_SOC = Variable(
    "RBLN_TARGET_SOC",
    parse_optional_text,
    None,
    "Older name of `RBLN_FORCE_NPU_NAME`, read when that one is unset.",
)
_HOST_EXECUTOR = Variable(
    "RBLN_HOST_EXECUTOR",
    parse_executor,
    "native",
    "Which executor runs programs on HOST: `native` (our kernels) or `reference` (torch's CPU "
    "operators, one command at a time: slow, for comparison).",
)
_HOST_ISA = Variable[str | None](
    "RBLN_HOST_ISA",
    parse_isa,
    None,
    "Instruction set of the native kernels: `portable`, `avx2`, `avx512` or `avx512_bf16`, which "
    "this CPU must have. Unset: its best.",
)
_HOST_SPIN_US = Variable(
    "RBLN_HOST_SPIN_US",
    parse_count,
    20,
    "Microseconds that an idle thread of the native executor waits awake before it sleeps.",
)
_GRAMMAR_SECONDS = Variable(
    "RBLN_GRAMMAR_SECONDS",
    parse_count,
    10,
    "Seconds that the grammar of a structured output may take to compile before its request is "
    "answered with 400. 0 = grammars are not compiled before the engine has them.",
)
_CACHE_ROOT = Variable(
    "VLLM_CACHE_ROOT",
    parse_optional_text,
    None,
    "vLLM's cache root; programs are cached below `rbln/`. Default `~/.cache/vllm`.",
)
_XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME",
    parse_optional_text,
    None,
    "Where user caches live when `VLLM_CACHE_ROOT` is unset. Default `~/.cache`.",
)
_DISABLE_COMPILE_CACHE = Variable(
    "VLLM_DISABLE_COMPILE_CACHE", parse_bool, False, "Neither read nor write the program cache."
)
_KV_CACHE_SPACE = Variable(
    "VLLM_CPU_KVCACHE_SPACE",
    parse_gib,
    None,
    "Size of the KV cache in GiB (fractions allowed), instead of a share of free memory.",
)
_PUBLISHED_IMPL = Variable(
    "_VLLM_RBLN_RESOLVED_MODEL_IMPL",
    parse_text,
    "",
    "Internal: the implementation a parent process resolved. Written by the plugin, not by users.",
)
_OMP_WAIT_POLICY = Variable(
    "OMP_WAIT_POLICY",
    parse_text,
    "PASSIVE",
    "Whether idle OpenMP threads sleep (`PASSIVE`) or spin; set for child processes when unset.",
)
_START_METHOD = Variable(
    "VLLM_WORKER_MULTIPROC_METHOD",
    parse_optional_text,
    None,
    "How engine processes start: `fork` or `spawn`. Unset: forked by `LLM(...)` where nothing "
    "stands against it (6 s faster), else spawned, as `vllm serve` always does.",
)
_VISIBLE_DEVICES = Variable(
    "RBLN_VISIBLE_DEVICES",
    parse_text,
    "",
    "Which NPUs this process may use, for example `0,1`.",
    no_effect="no effect on HOST: the machine's CPU is the one device",
)
_DEVICES = Variable(
    "RBLN_DEVICES",
    parse_text,
    "",
    "Deprecated name of `RBLN_VISIBLE_DEVICES`: removed from the environment and folded into it.",
)
_USE_VLLM_MODEL = Variable[bool | None](
    "VLLM_RBLN_USE_VLLM_MODEL",
    parse_bool,
    None,
    "Deprecated, removed in 0.14.0: use `--model-impl vllm` or `--model-impl optimum`.",
)

ACTIVE: tuple[Variable[Any], ...] = (
    _ENABLE_WARM_UP,
    _COMPILE_ONLY,
    _NUM_HIDDEN_LAYERS,
    _FORCE_NPU_NAME,
    _TARGET_SOC,
    _HOST_EXECUTOR,
    _HOST_ISA,
    _HOST_SPIN_US,
    _GRAMMAR_SECONDS,
    _CACHE_ROOT,
    _XDG_CACHE_HOME,
    _DISABLE_COMPILE_CACHE,
    _KV_CACHE_SPACE,
    _OMP_WAIT_POLICY,
    _START_METHOD,
    _DEVICES,
    _USE_VLLM_MODEL,
    _PUBLISHED_IMPL,
)

INERT: tuple[Variable[Any], ...] = (
    _VISIBLE_DEVICES,
    *(_inert(*row) for row in env_tables.INERT),
)

# Where two variables replace the same field, the first one that is set wins.
DEPRECATED: tuple[Variable[Any], ...] = tuple(
    _deprecated(name, parse, field) for name, parse, field in env_tables.DEPRECATED
)

REGISTRY: tuple[Variable[Any], ...] = ACTIVE + INERT + DEPRECATED


def enable_warm_up() -> bool:
    return _ENABLE_WARM_UP.get()


def compile_only() -> bool:
    return _COMPILE_ONLY.get()


def num_hidden_layers() -> int:
    """The number of decoder layers to build; 0 = all."""
    return _NUM_HIDDEN_LAYERS.get()


def force_npu_name() -> str | None:
    """The device to dry-run, or None."""
    return _FORCE_NPU_NAME.get() or _TARGET_SOC.get()


def host_executor() -> str:
    """`native` or `reference`."""
    return _HOST_EXECUTOR.get()


def host_isa() -> str | None:
    """The instruction set that the native kernels must use; None = the best of this CPU."""
    return _HOST_ISA.get()


def host_spin_us() -> int:
    """Microseconds that an idle native thread waits awake."""
    return _HOST_SPIN_US.get()


def grammar_seconds() -> int:
    """Seconds a grammar may take to compile in the API server; 0 = it is not compiled there."""
    return _GRAMMAR_SECONDS.get()


def cache_root() -> Path:
    """vLLM's cache root, found as vLLM finds it."""
    root = _CACHE_ROOT.get()
    if root is not None:
        return Path(root).expanduser()
    return Path(_XDG_CACHE_HOME.get() or "~/.cache").expanduser() / "vllm"


def compile_cache_disabled() -> bool:
    return _DISABLE_COMPILE_CACHE.get()


def kv_cache_space_bytes() -> int | None:
    """The size the user set for the KV cache in bytes; None = size it from free memory."""
    return _KV_CACHE_SPACE.get()


@contextmanager
def kv_cache_space_hidden() -> Iterator[None]:
    """Hides the variable from vLLM's own reader, which fails on fractions of a GiB."""
    value = os.environ.pop(_KV_CACHE_SPACE.name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[_KV_CACHE_SPACE.name] = value


@contextmanager
def start_method_kept(may_fork: bool) -> Iterator[None]:
    """Undoes vLLM's order to spawn on a CPU: what the user set stays, unset stays unset (`fork`).

    Without `may_fork` an unset variable becomes `spawn`, as vLLM would have it.
    """
    value = _START_METHOD.get()
    try:
        yield
    finally:
        if value is not None:
            os.environ[_START_METHOD.name] = value
        elif may_fork:
            os.environ.pop(_START_METHOD.name, None)
        else:
            os.environ[_START_METHOD.name] = "spawn"


def visible_devices() -> str:
    return _VISIBLE_DEVICES.get()


def use_vllm_model() -> bool | None:
    """The deprecated choice of implementation; None = not set."""
    return _USE_VLLM_MODEL.get()


def published_model_impl() -> str | None:
    """What a parent process published, or None.

    What this process published is about another model, and a value without the publisher's
    mark was typed by a user: both are ignored.
    """
    impl, _, pid = _PUBLISHED_IMPL.get().partition("@")
    if impl not in ("vllm", "transformers") or not pid.isdecimal() or int(pid) == os.getpid():
        return None
    return impl


def publish_model_impl(impl: str) -> None:
    """Writes the resolved implementation for child processes."""
    if impl not in ("vllm", "transformers"):
        raise ValueError(f"{impl!r} is not a resolved implementation")
    os.environ[_PUBLISHED_IMPL.name] = f"{impl}@{os.getpid()}"


def fold_device_pool() -> tuple[str, ...]:
    """Moves the deprecated `RBLN_DEVICES` into `RBLN_VISIBLE_DEVICES`; returns warnings.

    Writes the environment. When both are set the new name keeps its value.
    """
    if not _DEVICES.is_set:
        return ()
    old = os.environ.pop(_DEVICES.name)
    kept = os.environ.setdefault(_VISIBLE_DEVICES.name, old)
    text = f"{_DEVICES.name} is deprecated: use {_VISIBLE_DEVICES.name} (now {kept!r})"
    return (text if kept == old else f"{text}; the value {old!r} of {_DEVICES.name} is ignored",)


def deprecated_values() -> dict[str, tuple[str, Any]]:
    """Option field -> (variable that set it, parsed value), for every deprecated variable set.

    A variable that parses to None (an empty number) counts as unset.
    """
    found: dict[str, tuple[str, Any]] = {}
    for row in DEPRECATED:
        if row.is_set and (value := row.get()) is not None:
            found.setdefault(row.field, (row.name, value))
    return found


def check_environment() -> tuple[str, ...]:
    """One warning for each variable that is set and has no effect."""
    return tuple(f"{row.name} is set: {row.no_effect}" for row in INERT if row.is_set)


def upstream_readers() -> dict[str, Callable[[], Any]]:
    """Readers to put into `vllm.envs.environment_variables`.

    Our `VLLM_RBLN_*` names, since vLLM warns about `VLLM_*` names it does not know, and the KV
    cache size, since vLLM's own reader fails on a fraction.
    """
    ours = {row.name: row.get for row in REGISTRY if row.name.startswith("VLLM_RBLN_")}
    return {**ours, _KV_CACHE_SPACE.name: _KV_CACHE_SPACE.get}


def park_idle_openmp_threads() -> None:
    """Lets OpenMP threads of child processes sleep between parallel regions, unless set.

    By default they spin, and where a core is shared each of a step's hundreds of regions then
    waits for a time slice: a decode step took 1.2 s spinning and 70 ms parked.
    """
    os.environ.setdefault(_OMP_WAIT_POLICY.name, _OMP_WAIT_POLICY.default)


def quiet_lmcache() -> None:
    """LMCache's switches, unless set: no usage reports to its makers, no banner, only warnings."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
