# SPDX-License-Identifier: Apache-2.0
"""The linears of a Hugging Face model that may have adapters."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rbln_vllm.toolchain import AdaptedModule


def linears(model: PreTrainedModel) -> tuple[AdaptedModule, ...]:
    """All of them, by the names that PEFT uses too, but for the output head."""
    head = model.get_output_embeddings()
    return tuple(_linears(model, head))


def _linears(model: PreTrainedModel, head: object) -> Iterator[AdaptedModule]:
    for name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, torch.nn.Linear):
            sizes = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):  # GPT-2's, whose weight lies the other way round
            sizes = (module.nx, module.nf)
        else:
            continue
        yield AdaptedModule(name, f"{name}.weight", *sizes)
