# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests.

Models are imported late, so that unit tests start without torch and Transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process_state import changes, process_state

# Set before any library reads them; a value from outside wins.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Idle OpenMP threads sleep: where cores are shared, spinning ones make torch 5 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_finish(session: pytest.Session) -> None:
    """vLLM has one platform a process; the scheduler's tests want its own, engines want ours."""
    folders = {item.path.relative_to(session.config.rootpath).parts[1:3] for item in session.items}
    if ("unit", "core") in folders and any(folder[0] != "unit" for folder in folders):
        raise pytest.UsageError(
            "run tests/unit, tests/engine and tests/server one at a time, as `make test` does"
        )


@pytest.fixture(scope="session", autouse=True)
def private_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither find nor leave compiled programs in the user's own cache."""
    os.environ.setdefault("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm-cache")))


@pytest.fixture(scope="module", autouse=True)
def process_as_it_was(private_compile_cache: None) -> Iterator[None]:
    """Files share processes, which ones depends on timing: a file must not show in another."""
    before = process_state()
    yield
    found = changes(before, process_state())
    assert not found, f"this module has changed its process: {'; '.join(found)}"


@pytest.fixture(scope="session")
def tiny_model_dir() -> Callable[..., Path]:
    """`tiny_model_dir(architecture, **config_overrides)`: see tests/models.py for the names."""
    from tests import models

    return models.tiny_model_dir


@pytest.fixture(scope="session")
def tiny_llama_dir(tiny_model_dir: Callable[..., Path]) -> Path:
    """A Llama of 2 layers, hidden size 64, heads of 32, 512 tokens, 512 positions, in float32."""
    return tiny_model_dir("LlamaForCausalLM")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in bfloat16."""
    from tests import models

    return models.smollm2_dir()
