# SPDX-License-Identifier: Apache-2.0
"""Engines of this folder run in the test's process and keep their programs between runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import LLM
from vllm import logger as vllm_logger

from tests.engine.engines import environment, running_engine
from tests.models import ROOT

# A cache root from outside wins over ours.
CACHE_ROOT = os.environ.get("VLLM_CACHE_ROOT", str(ROOT / ".cache" / "engine-tests"))


@pytest.fixture(scope="package", autouse=True)
def engine_environment(private_compile_cache: None) -> Iterator[None]:
    """Engines in this process, programs compiled once per checkout."""
    with environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CACHE_ROOT=CACHE_ROOT):
        yield


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
