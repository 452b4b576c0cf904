# SPDX-License-Identifier: Apache-2.0
"""One vLLM configuration of a tiny model for all scheduler tests."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

# The scheduler needs no platform of ours; set before vLLM is first imported.
os.environ.setdefault("VLLM_PLUGINS", "")

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

from tests.unit.core.harness import BASE_MODEL, SchedulerFactory


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> SchedulerFactory:
    """Returns a factory of real schedulers; see ``SchedulerFactory`` for its options."""
    model_dir = _write_model(tmp_path_factory.mktemp("model"))
    with patch.dict(os.environ):  # vLLM writes variables for processes that it would start
        config = _config(model_dir)
    return SchedulerFactory(config)


def _config(model_dir: Path) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=str(model_dir), skip_tokenizer_init=True, dtype="float32"),
        cache_config=CacheConfig(block_size=32),
        scheduler_config=SchedulerConfig(
            max_model_len=BASE_MODEL["max_position_embeddings"],
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )


def _write_model(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(BASE_MODEL))
    return directory
