# SPDX-License-Identifier: Apache-2.0
"""Classifiers: from a sequence's pooled hidden states to its logits."""

import copy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

HEAD = "pooling_head"
"""Under which name a model keeps its classifier for programs."""


class Classifier(torch.nn.Module):
    """A model's own classifier, in a dtype of its own. ``[B, hidden]`` to ``[B, labels]``.

    Those of encoders take all hidden states of a sequence and look at the first.
    """

    def __init__(self, *layers: torch.nn.Module, dtype: torch.dtype, takes_tokens: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(copy.deepcopy(layer).to(dtype) for layer in layers)
        self._takes_tokens = takes_tokens

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden[:, None] if self._takes_tokens else hidden
        for layer in self.layers:
            output = layer(output)
        return output


def attach_classifier(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give ``model`` its classifier under the name ``HEAD``.

    Raises NotImplementedError for a model with a classifier of another kind.
    """
    parts = cast(Any, model)
    if hasattr(model, "score"):
        head = Classifier(parts.score, dtype=dtype, takes_tokens=False)
    elif hasattr(getattr(model, "classifier", None), "out_proj"):
        head = Classifier(parts.classifier, dtype=dtype, takes_tokens=True)
    elif hasattr(model, "classifier") and getattr(parts.base_model, "pooler", None) is not None:
        pooler = parts.base_model.pooler
        head = Classifier(pooler, parts.classifier, dtype=dtype, takes_tokens=True)
    else:
        raise NotImplementedError(f"the classifier of {type(model).__name__} is not built yet")
    model.add_module(HEAD, head)


def attach_answers(model: PreTrainedModel, no: int, yes: int, dtype: torch.dtype) -> None:
    """Give a causal model a classifier of one label: how much rather it says yes than no."""
    weight_VH = cast(Any, model.get_output_embeddings()).weight.detach().to(dtype)
    score = torch.nn.Linear(weight_VH.shape[1], 1, bias=False, dtype=dtype)
    score.weight = torch.nn.Parameter(weight_VH[yes : yes + 1] - weight_VH[no : no + 1])
    model.add_module(HEAD, Classifier(score, dtype=dtype, takes_tokens=False))
