# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in MXFP4: experts of four bits an element, which become the model's dtype at load.

Each 32 elements share a power of two (OCP Microscaling Formats, version 1.0: E2M1 elements, E8M0
scales), so that bfloat16 holds every product exactly. Transformers takes them apart weight by
weight while it loads; programs read the result, four times as large as the checkpoint's.
"""

from typing import TYPE_CHECKING, Any

from rbln_vllm.models.select import implementation_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHODS = ("mxfp4", "gpt_oss_mxfp4")
"""vLLM's names of such checkpoints."""


def refusal(vllm_config: "VllmConfig") -> str:
    """Why a quantised checkpoint cannot be served, and what can; empty when it can."""
    method = vllm_config.model_config.quantization
    if method is None:
        return ""
    if method not in METHODS:
        return f"Quantised checkpoints ({method}) are not built yet: use the unquantised model."
    if implementation_of(vllm_config) != "transformers":
        return (
            "MXFP4 checkpoints are read by the transformers implementation alone: use "
            "--model-impl transformers, or the unquantised model."
        )
    return ""


def set_dequantised(config: Any) -> None:
    """Have Transformers take the weights of this configuration apart while it loads them.

    Does nothing for weights that are not quantised; ValueError for another quantisation.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return
    fields = given if isinstance(given, dict) else given.to_dict()
    method = str(getattr(fields["quant_method"], "value", fields["quant_method"]))
    if method not in METHODS:
        raise ValueError(
            f"Quantised checkpoints ({method}) are not built yet: use the unquantised model."
        )
    # vLLM puts its own name of the method there.
    config.quantization_config = {"quant_method": METHODS[0], "dequantize": True}
