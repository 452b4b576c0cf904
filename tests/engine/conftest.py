# SPDX-License-Identifier: Apache-2.0
"""Engines of this folder run in the test's process and keep their programs between runs."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from vllm import LLM
from vllm import logger as vllm_logger
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)

import rbln_host.compiler
import rbln_host.ops
import rbln_vllm.models
from rbln_vllm.sources import digest_packages
from tests.engine.engines import environment, running_engine
from tests.models import ROOT

# A cache root from outside wins over ours.
OUTER_ROOT = os.environ.get("VLLM_CACHE_ROOT")


@pytest.fixture(scope="package", autouse=True)
def engine_environment(private_compile_cache: None) -> Iterator[None]:
    """Engines in this process, programs compiled once per state of the compiler.

    Engines share vLLM's process groups, which the first to end would take from the others.
    """
    root = OUTER_ROOT or str(_fresh_cache_root(ROOT / ".cache" / "engine-tests"))
    with (
        environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CACHE_ROOT=root),
        patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"),
    ):
        yield
    destroy_model_parallel()
    destroy_distributed_environment()


def _fresh_cache_root(root: Path) -> Path:
    """`root`, without programs of older compilers: nothing would ever use or remove them."""
    stamp = digest_packages((rbln_vllm.models, rbln_host.compiler, rbln_host.ops))
    stamp_file = root / "compiler"
    if not stamp_file.exists() or stamp_file.read_text() != stamp:
        shutil.rmtree(root / "rbln", ignore_errors=True)
        root.mkdir(parents=True, exist_ok=True)
        stamp_file.write_text(stamp)
    return root


@pytest.fixture(scope="package")
def tiny_llm(engine_environment: None, tiny_llama_dir: Path) -> Iterator[LLM]:
    """The tiny Llama in fp32 with the defaults of engines.py. Leave it as you found it."""
    with running_engine(tiny_llama_dir) as llm:
        yield llm


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
