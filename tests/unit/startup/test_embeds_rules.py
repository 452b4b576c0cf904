# SPDX-License-Identifier: Apache-2.0
"""What does not go with embeddings as inputs."""

from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.config import OptimumRBLNConfig
from rbln_vllm.distributed.kv_transfer.lmcache import CONNECTOR
from rbln_vllm.startup.engine_rules import EMBEDS_REFUSALS


def refusals(prompt_embeds: bool = True, connector: str | None = None) -> list[str]:
    """Of a configuration of the transformers implementation whose programs take embeddings."""
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    model = SimpleNamespace(
        enable_prompt_embeds=prompt_embeds,
        hf_config=SimpleNamespace(),
        get_hidden_size=lambda: 64,
        runner_type="generate",
    )
    config: Any = SimpleNamespace(
        model_config=model,
        kv_transfer_config=transfer,
        speculative_config=None,
        lora_config=None,
        additional_config=OptimumRBLNConfig(),
    )
    return [refusal.text for refusal in EMBEDS_REFUSALS if refusal.applies(config)]


@pytest.mark.parametrize("connector", [None, "OffloadingConnector"])
def test_blocks_are_named_by_embeddings_too(connector: str | None) -> None:
    assert not refusals(connector=connector)


def test_a_store_that_names_by_token_ids() -> None:
    """All prompts of embeddings would have the same name there."""
    (text,) = refusals(connector=CONNECTOR)
    assert "names KV by token ids" in text
    assert not refusals(prompt_embeds=False, connector=CONNECTOR)
