# SPDX-License-Identifier: Apache-2.0
"""EXAONE 3 and 3.5: Llama's modules under the vendor's name of the architecture."""

from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rbln_vllm.models.exaone import ExaoneConfig, register_config


class ExaoneForCausalLM(LlamaForCausalLM):
    """Llama; a checkpoint's weights are renamed while it is loaded."""

    config_class = ExaoneConfig


register_config()
AutoModelForCausalLM.register(ExaoneConfig, ExaoneForCausalLM, exist_ok=True)
