# SPDX-License-Identifier: Apache-2.0
"""Rules of a pooling model's configuration: what is refused, and what is settled."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from rbln_vllm.models.architectures import POOLING_TASKS, built, is_encoder
from rbln_vllm.models.select import implementation_of
from rbln_vllm.pooling.config import encoder_step_tokens, is_encoder_only, is_pooling, positions_of
from rbln_vllm.pooling.reranker import answer_ids, check_overrides, is_original_reranker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger("vllm.rbln.pooling")


def prepare_encoder(args: "EngineArgs", architectures: Collection[str]) -> bool:
    """Fill in an encoder's defaults; returns whether the model is one.

    fp32: vLLM would take fp16 for checkpoints in fp32, which nearly all encoders are, and which is
    no faster here. Raises ValueError for a reranker's overrides that lack something.
    """
    check_overrides(args.hf_overrides)
    if not is_encoder(architectures) or args.runner == "generate":
        return False
    if args.dtype == "auto":
        args.dtype = "float32"
    if args.max_num_batched_tokens is not None and args.max_num_scheduled_tokens is None:
        args.max_num_scheduled_tokens = args.max_num_batched_tokens
    return True


def refuse_unbuilt_pooling(config: "VllmConfig") -> None:
    """ValueError, with the reason and the setting to change, for what cannot be pooled."""
    model = config.model_config
    if not is_pooling(model):
        return
    known = built(*POOLING_TASKS)
    if not set(known) & set(model.architectures):
        raise ValueError(
            f"{', '.join(model.architectures)} is not built for pooling (embed, classify, score): "
            f"use a model of {', '.join(known)}"
        )
    if implementation_of(config) != "transformers":
        raise ValueError(
            "Pooling models (embed, classify, score) are built for the transformers "
            "implementation: leave out --model-impl vllm"
        )
    if config.kv_transfer_config is not None or config.cache_config.kv_offloading_size:
        raise ValueError(
            "Pooling models share no KV: leave out --kv-transfer-config and --kv-offloading-size"
        )
    if config.lora_config is not None:
        raise ValueError(
            "LoRA for pooling models is not supported yet: leave out --enable-lora, and merge the "
            "adapter into the model's weights (PEFT's merge_and_unload)"
        )
    if config.scheduler_config.long_prefill_token_threshold and is_encoder_only(model):
        raise ValueError(
            "An encoder computes whole prompts: leave out --long-prefill-token-threshold"
        )
    if is_original_reranker(model.hf_config):
        answer_ids(model)


def settle_pooling(config: "VllmConfig") -> None:
    """Sizes and switches that follow from pooling. ValueError for lengths a model does not have."""
    model, scheduler = config.model_config, config.scheduler_config
    if not is_pooling(model):
        return
    if config.cache_config.enable_prefix_caching:
        logger.info_once("Prefix caching is off: a pooling model wants every hidden state")
        config.cache_config.enable_prefix_caching = False
    if not is_encoder_only(model):
        return
    _settle_length(config)
    if scheduler.max_num_scheduled_tokens is None:
        most = encoder_step_tokens(model.max_model_len, scheduler.max_num_seqs)
        scheduler.max_num_scheduled_tokens = min(scheduler.max_num_batched_tokens, most)
    if scheduler.max_num_scheduled_tokens < model.max_model_len:
        raise ValueError(
            f"--max-num-scheduled-tokens {scheduler.max_num_scheduled_tokens} is less than the "
            f"maximum length {model.max_model_len}: an encoder computes a prompt in one step"
        )


def _settle_length(config: "VllmConfig") -> None:
    """RoBERTa's position table begins with rows that no token has: sequences are shorter."""
    model = config.model_config
    most = positions_of(model.hf_config)
    if most is None or model.max_model_len <= most:
        return
    if model.original_max_model_len is not None:
        raise ValueError(
            f"--max-model-len {model.max_model_len} is more than the {most} positions of this "
            f"model: its table has {model.hf_config.max_position_embeddings} rows, of which the "
            f"first {model.hf_config.max_position_embeddings - most} are for padding"
        )
    logger.info_once("The longest sequence of this model has %d tokens", most)
    model.max_model_len = most
