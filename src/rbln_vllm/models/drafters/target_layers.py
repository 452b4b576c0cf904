# SPDX-License-Identifier: Apache-2.0
"""Which layers of the target an EAGLE-3 drafter reads."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def reads_layers(vllm_config: "VllmConfig") -> bool:
    """Whether the target's programs must also return states of layers inside it."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method != "eagle3":
        return False
    return bool(_eagle_config(vllm_config).get("use_aux_hidden_state", True))


def layers_read(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """Numbers of the layers whose input states the drafter was trained on; empty: the target's
    own choice."""
    layers = getattr(draft_hf_config(vllm_config), "eagle_aux_hidden_state_layer_ids", None)
    layers = layers or _eagle_config(vllm_config).get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(layer) for layer in layers or ())


def return_layers(vllm_config: "VllmConfig", target: torch.nn.Module) -> None:
    """Make the target return the states that the drafter reads.

    Raises RuntimeError for an architecture that vLLM has not prepared for it.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(target):
        raise RuntimeError(
            f"Model does not support EAGLE3 interface: {type(target).__name__} cannot return the "
            "hidden states of its layers. Use an eagle or draft_model drafter"
        )
    model: Any = target
    layers = layers_read(vllm_config) or model.get_eagle3_default_aux_hidden_state_layers()
    model.set_aux_hidden_state_layers(layers)


def draft_hf_config(vllm_config: "VllmConfig") -> Any:
    """The drafter's own configuration."""
    speculation = vllm_config.speculative_config
    assert speculation is not None
    return speculation.draft_model_config.hf_config


def _eagle_config(vllm_config: "VllmConfig") -> dict[str, Any]:
    return getattr(draft_hf_config(vllm_config), "eagle_config", None) or {}
