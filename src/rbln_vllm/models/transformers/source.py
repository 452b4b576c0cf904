# SPDX-License-Identifier: Apache-2.0
"""Where a model comes from, and building it: with its weights, or only its shape."""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

import rbln_vllm.models.transformers.exaone  # noqa: F401  (registers its modules)
from rbln_vllm.models.architectures import Architecture
from rbln_vllm.models.exaone import key_mapping, own_config
from rbln_vllm.models.mxfp4 import set_dequantised
from rbln_vllm.models.transformers.attention import ATTENTION
from rbln_vllm.models.transformers.experts import replace_experts
from rbln_vllm.pooling.config import classifies, is_pooling
from rbln_vllm.pooling.reranker import OVERRIDES as RERANKER_OVERRIDES
from rbln_vllm.pooling.reranker import is_original_reranker

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LOAD_FORMATS = ("auto", "hf", "safetensors", "pt")
"""Formats of vLLM's ``--load-format`` in which Transformers finds the weights by itself."""

DUMMY_SEED = 0

HEADS = ("score.", "classifier.")
"""How the weights of classifiers are called."""


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face model: ``config`` after overrides, and the directory or hub id of its weights.

    ``dummy`` takes random weights in place of the checkpoint's. ``auto`` is Transformers' class
    that makes it.
    """

    config: PretrainedConfig
    name: str
    dtype: torch.dtype
    dummy: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    auto: Any = AutoModelForCausalLM

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "ModelSource":
        """Raises ValueError for a load format that Transformers does not have."""
        model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
        if load_format not in (*LOAD_FORMATS, "dummy"):
            raise ValueError(
                f"--load-format {load_format} is not supported by the transformers "
                f"implementation: use {', '.join(LOAD_FORMATS)} or dummy, or --model-impl vllm"
            )
        return cls(
            config=model.hf_config,
            name=str(model.model),
            dtype=model.dtype,
            dummy=load_format == "dummy",
            revision=model.revision,
            trust_remote_code=bool(model.trust_remote_code),
            auto=_auto_class(model),
        )

    def load(self) -> PreTrainedModel:
        """The model with its weights in memory, in evaluation mode.

        Experts in MXFP4 are taken apart. OSError or ValueError of Transformers when it cannot be
        found or built, ValueError for another quantisation and for a classifier that the checkpoint
        has no weights of.
        """
        if self.dummy:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(DUMMY_SEED)
                return self._from_config()
        config = own_config(copy.deepcopy(self.config))
        set_dequantised(config)
        model, found = self.auto.from_pretrained(
            self.name,
            config=config,
            dtype=self.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=ATTENTION,
            key_mapping=key_mapping(self.config),
            output_loading_info=True,
        )
        self._check_head(found["missing_keys"])
        return _finished(model)

    def _check_head(self, missing: Collection[str]) -> None:
        absent = sorted(name for name in missing if name.startswith(HEADS))
        if self.auto is AutoModelForSequenceClassification and absent:
            raise ValueError(
                f"{self.name} has no weights of a classifier ({', '.join(absent)}): it is not a "
                "model that classifies. For an original Qwen3-Reranker give --hf-overrides "
                f"'{RERANKER_OVERRIDES}'"
            )

    def shape(self) -> PreTrainedModel:
        """The model without weights, on the meta device: takes neither memory nor a checkpoint."""
        with torch.device("meta"):
            return self._from_config()

    def _from_config(self) -> PreTrainedModel:
        model: PreTrainedModel = self.auto.from_config(
            own_config(copy.deepcopy(self.config)),
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=ATTENTION,
        )
        return _finished(model)


def _auto_class(model: "ModelConfig") -> Any:
    """Embeddings come from the bare model, except of architectures that also generate text."""
    if not is_pooling(model) or is_original_reranker(model.hf_config):
        return AutoModelForCausalLM
    if classifies(model):
        return AutoModelForSequenceClassification
    generates = model.architectures[0].endswith("ForCausalLM")
    return AutoModelForCausalLM if generates else AutoModel


def auto_class_of(row: Architecture, config: PretrainedConfig) -> Any:
    """Transformers' class that makes a model which is compiled as this architecture."""
    if not row.only_pools or is_original_reranker(config):
        return AutoModelForCausalLM
    return AutoModelForSequenceClassification if row.classifies else AutoModel


def _finished(model: PreTrainedModel) -> PreTrainedModel:
    replace_experts(model)
    return model.eval()
