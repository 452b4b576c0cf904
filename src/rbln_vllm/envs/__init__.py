# SPDX-License-Identifier: Apache-2.0
"""The one registry of environment variables: no other package reads the environment.

Every row is read when asked, so a test may set `os.environ` at any time. What is written for
child processes (`publish_model_impl`, `fold_device_pool`) lives here too.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rbln_vllm.envs import table
from rbln_vllm.envs.table import ACTIVE, DEPRECATED, INERT, REGISTRY, Variable

__all__ = [
    "ACTIVE",
    "DEPRECATED",
    "INERT",
    "REGISTRY",
    "Variable",
    "cache_root",
    "check_environment",
    "compile_cache_disabled",
    "compile_only",
    "deprecated_values",
    "enable_warm_up",
    "fold_device_pool",
    "force_npu_name",
    "grammar_seconds",
    "host_executor",
    "host_isa",
    "host_spin_us",
    "kv_cache_space_bytes",
    "kv_cache_space_hidden",
    "num_hidden_layers",
    "park_idle_openmp_threads",
    "publish_model_impl",
    "published_model_impl",
    "quiet_lmcache",
    "start_method_kept",
    "upstream_readers",
    "use_vllm_model",
    "visible_devices",
]


def enable_warm_up() -> bool:
    return table.ENABLE_WARM_UP.get()


def compile_only() -> bool:
    return table.COMPILE_ONLY.get()


def num_hidden_layers() -> int:
    """The number of decoder layers to build; 0 = all."""
    return table.NUM_HIDDEN_LAYERS.get()


def force_npu_name() -> str | None:
    """The device to dry-run, or None."""
    return table.FORCE_NPU_NAME.get() or table.TARGET_SOC.get()


def host_executor() -> str:
    """`native` or `reference`."""
    return table.HOST_EXECUTOR.get()


def host_isa() -> str | None:
    """The instruction set that the native kernels must use; None = the best of this CPU."""
    return table.HOST_ISA.get()


def host_spin_us() -> int:
    """Microseconds that an idle native thread waits awake."""
    return table.HOST_SPIN_US.get()


def grammar_seconds() -> int:
    """Seconds a grammar may take to compile in the API server; 0 = it is not compiled there."""
    return table.GRAMMAR_SECONDS.get()


def cache_root() -> Path:
    """vLLM's cache root, found as vLLM finds it."""
    root = table.CACHE_ROOT.get()
    if root is not None:
        return Path(root).expanduser()
    return Path(table.XDG_CACHE_HOME.get() or "~/.cache").expanduser() / "vllm"


def compile_cache_disabled() -> bool:
    return table.DISABLE_COMPILE_CACHE.get()


def kv_cache_space_bytes() -> int | None:
    """The size the user set for the KV cache in bytes; None = size it from free memory."""
    return table.KV_CACHE_SPACE.get()


@contextmanager
def kv_cache_space_hidden() -> Iterator[None]:
    """Hides the variable from vLLM's own reader, which fails on fractions of a GiB."""
    value = os.environ.pop(table.KV_CACHE_SPACE.name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[table.KV_CACHE_SPACE.name] = value


@contextmanager
def start_method_kept(may_fork: bool) -> Iterator[None]:
    """Undoes vLLM's order to spawn on a CPU: what the user set stays, unset stays unset (`fork`).

    Without `may_fork` an unset variable becomes `spawn`, as vLLM would have it.
    """
    value = table.START_METHOD.get()
    try:
        yield
    finally:
        if value is not None:
            os.environ[table.START_METHOD.name] = value
        elif may_fork:
            os.environ.pop(table.START_METHOD.name, None)
        else:
            os.environ[table.START_METHOD.name] = "spawn"


def visible_devices() -> str:
    return table.VISIBLE_DEVICES.get()


def use_vllm_model() -> bool | None:
    """The deprecated choice of implementation; None = not set."""
    return table.USE_VLLM_MODEL.get()


def published_model_impl() -> str | None:
    """What a parent process published, or None.

    What this process published is about another model, and a value without the publisher's
    mark was typed by a user: both are ignored.
    """
    impl, _, pid = table.PUBLISHED_IMPL.get().partition("@")
    if impl not in ("vllm", "transformers") or not pid.isdecimal() or int(pid) == os.getpid():
        return None
    return impl


def publish_model_impl(impl: str) -> None:
    """Writes the resolved implementation for child processes."""
    if impl not in ("vllm", "transformers"):
        raise ValueError(f"{impl!r} is not a resolved implementation")
    os.environ[table.PUBLISHED_IMPL.name] = f"{impl}@{os.getpid()}"


def fold_device_pool() -> tuple[str, ...]:
    """Moves the deprecated `RBLN_DEVICES` into `RBLN_VISIBLE_DEVICES`; returns warnings.

    Writes the environment. When both are set the new name keeps its value.
    """
    if not table.DEVICES.is_set:
        return ()
    old = os.environ.pop(table.DEVICES.name)
    kept = os.environ.setdefault(table.VISIBLE_DEVICES.name, old)
    text = f"{table.DEVICES.name} is deprecated: use {table.VISIBLE_DEVICES.name} (now {kept!r})"
    return (
        text if kept == old else f"{text}; the value {old!r} of {table.DEVICES.name} is ignored",
    )


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
    return {**ours, table.KV_CACHE_SPACE.name: table.KV_CACHE_SPACE.get}


def park_idle_openmp_threads() -> None:
    """Lets OpenMP threads of child processes sleep between parallel regions, unless set.

    By default they spin, and where a core is shared each of a step's hundreds of regions then
    waits for a time slice: a decode step took 1.2 s spinning and 70 ms parked.
    """
    os.environ.setdefault(table.OMP_WAIT_POLICY.name, table.OMP_WAIT_POLICY.default)


def quiet_lmcache() -> None:
    """LMCache's switches, unless set: no usage reports to its makers, no banner, only warnings."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
