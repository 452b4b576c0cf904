# SPDX-License-Identifier: Apache-2.0
"""Engines of this folder run in the test's process and keep their programs between runs."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm import LLM
from vllm import logger as vllm_logger
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from vllm.triton_utils import dispatcher

import rbln_host.compiler
import rbln_host.ops
import rbln_vllm.models
from rbln_vllm.sources import digest_packages
from tests.engine.engines import check_idle, environment, running_engine
from tests.engine.kept import kept_directory
from tests.models import ROOT

# A cache root from outside wins over ours.
OUTER_ROOT = os.environ.get("VLLM_CACHE_ROOT")


@pytest.fixture(scope="package", autouse=True)
def engine_environment(private_compile_cache: None, tiny_llama_dir: Path) -> Iterator[None]:
    """Engines in this process, programs compiled once per state of the compiler.

    Processes are spawned, also before the first engine has made threads: a fork has nothing of
    those but the locks they hold. Engines share vLLM's process groups, which the first to end would
    take from the others.
    """
    with (
        _cache_root() as root,
        environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_WORKER_MULTIPROC_METHOD="spawn",
            VLLM_CACHE_ROOT=str(root),
        ),
        patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"),
        _kernels_registered_once(),
    ):
        with running_engine(tiny_llama_dir):
            pass  # for what it imports
        with _imports_not_collected():
            yield
    destroy_model_parallel()
    destroy_distributed_environment()


def _cache_root() -> AbstractContextManager[Path]:
    if OUTER_ROOT is not None:
        return nullcontext(Path(OUTER_ROOT))
    compiler = digest_packages((rbln_vllm.models, rbln_host.compiler, rbln_host.ops))
    return kept_directory(ROOT / ".cache" / "engine-tests", compiler)


@contextmanager
def _kernels_registered_once() -> Iterator[None]:
    """Every engine looks for kernels in all modules, 0.4 s; here only when there are new ones."""
    register, known = dispatcher.register_kernels, 0

    def register_when_new(overrides: Mapping[str, Callable[..., Any]]) -> None:
        nonlocal known
        if known != len(sys.modules):
            register(overrides)
            known = len(sys.modules)

    with patch.object(dispatcher, "register_kernels", register_when_new):
        yield


@contextmanager
def _imports_not_collected() -> Iterator[None]:
    """An engine collects garbage five times; what imports left made that most of its life here.

    vLLM's own way to spare it, `gc.freeze` at start and `gc.unfreeze` at the end, would undo ours.
    """
    gc.collect()
    gc.freeze()
    with patch("vllm.v1.engine.core.freeze_gc_heap"), patch.object(gc, "unfreeze"):
        yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def torch_threads() -> Iterator[None]:
    """vLLM gives torch one thread when an engine loads, our worker all of them when it is ready."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def shared_llm(engine_environment: None, tiny_llama_dir: Path) -> Iterator[LLM]:
    with running_engine(tiny_llama_dir) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny_llm(shared_llm: LLM) -> Iterator[LLM]:
    """The tiny Llama in fp32 with the defaults of engines.py, at first with an empty cache.

    Modules share it: leave it as you found it.
    """
    assert shared_llm.reset_prefix_cache()
    yield shared_llm
    check_idle(shared_llm)


@pytest.fixture
def vllm_log() -> Iterator[list[str]]:
    """Messages logged below `vllm`, also those it says only once in a process."""
    for name in ("_print_info_once", "_print_warning_once"):
        getattr(vllm_logger, name).cache_clear()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
