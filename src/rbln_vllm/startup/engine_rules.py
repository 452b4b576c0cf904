# SPDX-License-Identifier: Apache-2.0
"""Rules of a finished vLLM configuration: what is refused, in words, and what is settled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import vllm.envs as vllm_envs
from vllm.logger import init_logger

from rbln_vllm import envs
from rbln_vllm.config import OptimumRBLNConfig
from rbln_vllm.config.overrides import CompileOverrides
from rbln_vllm.devices import DeviceProfile
from rbln_vllm.distributed.kv_transfer.lmcache import CONNECTOR as LMCACHE
from rbln_vllm.distributed.kv_transfer.lmcache.rules import settle_lmcache
from rbln_vllm.distributed.kv_transfer.offload.settle import CONNECTOR, settle_offload
from rbln_vllm.geometry import geometry_of, options_of, takes_embeds
from rbln_vllm.models import mxfp4
from rbln_vllm.models.architectures import Task, check_architecture
from rbln_vllm.models.select import implementation_of
from rbln_vllm.pooling.config import is_encoder_only, is_pooling
from rbln_vllm.pooling.rules import refuse_unbuilt_pooling
from rbln_vllm.speculation.rules import settle_speculation
from rbln_vllm.startup.engine_args import NO_CHUNKED_PREFILL

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.rbln.engine_rules")


@dataclass(frozen=True)
class Refusal:
    """``applies`` to a configuration, then ``text`` is what the user is told."""

    text: str
    applies: Callable[["VllmConfig"], bool]


REFUSALS = (
    Refusal(
        "Adapters have the model's dtype: leave out --lora-dtype.",
        lambda c: (
            c.lora_config is not None
            and c.lora_config.lora_dtype not in ("auto", None, c.model_config.dtype)
        ),
    ),
    Refusal(
        "Tensor, pipeline, data and expert parallelism are not built yet: use one process "
        "(--tensor-parallel-size 1 --pipeline-parallel-size 1 --data-parallel-size 1).",
        lambda c: (
            c.parallel_config.world_size_across_dp > 1 or c.parallel_config.enable_expert_parallel
        ),
    ),
    Refusal(
        "This KV connector is not built yet: use OffloadingConnector (--kv-offloading-size GIB) or "
        f"{LMCACHE}, or leave out --kv-transfer-config and --kv-offloading-backend.",
        lambda c: (
            (
                c.kv_transfer_config is not None
                and c.kv_transfer_config.kv_connector not in (CONNECTOR, LMCACHE)
            )
            # vLLM makes a transfer config of it only after this check.
            or (
                c.cache_config.kv_offloading_size is not None
                and c.cache_config.kv_offloading_backend != "native"
            )
        ),
    ),
    Refusal(
        "Weights are compiled into programs and cannot be offloaded: leave out --cpu-offload-gb "
        "and --offload-group-size.",
        lambda c: (
            c.offload_config.uva.cpu_offload_gb > 0
            or c.offload_config.prefetch.offload_group_size > 0
        ),
    ),
    Refusal(
        "Encoder disaggregation is not built yet: leave out --ec-transfer-config.",
        lambda c: c.ec_transfer_config is not None,
    ),
    Refusal(
        NO_CHUNKED_PREFILL,
        lambda c: (
            not c.scheduler_config.enable_chunked_prefill and not is_encoder_only(c.model_config)
        ),
    ),
    Refusal(
        "Model runner V2 is not supported. Set VLLM_USE_V2_MODEL_RUNNER=0.",
        # Asked for: without Triton vLLM falls back to V1 and says so in a warning only.
        lambda c: c.use_v2_model_runner or bool(vllm_envs.VLLM_USE_V2_MODEL_RUNNER),
    ),
    Refusal(
        "The KV cache has the model's dtype; fp8 is not built yet: leave out --kv-cache-dtype.",
        lambda c: c.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
    ),
    Refusal(
        "--load-format bitsandbytes quantises while loading, which is not built yet: leave it out.",
        lambda c: c.load_config.load_format == "bitsandbytes",
    ),
)

EMBEDS_REFUSALS = (
    Refusal(
        "Embeddings as inputs (--enable-prompt-embeds, use_inputs_embeds) are built for the "
        "transformers implementation alone: leave them out, or --model-impl vllm.",
        lambda c: implementation_of(c) != "transformers",
    ),
    Refusal(
        "A pooling model takes no embeddings as inputs: leave out --enable-prompt-embeds and "
        "use_inputs_embeds.",
        lambda c: is_pooling(c.model_config),
    ),
    Refusal(
        "This model's embeddings are narrower than its hidden states, and vLLM takes prompt "
        "embeddings of that width alone: leave out --enable-prompt-embeds.",
        lambda c: (
            c.model_config.enable_prompt_embeds
            and embedding_width(c.model_config) != c.model_config.get_hidden_size()
        ),
    ),
    Refusal(
        f"{LMCACHE} names KV by token ids, which prompt embeddings do not have: leave out "
        "--enable-prompt-embeds or --kv-transfer-config.",
        lambda c: (
            c.model_config.enable_prompt_embeds
            and c.kv_transfer_config is not None
            and c.kv_transfer_config.kv_connector == LMCACHE
        ),
    ),
    Refusal(
        "Embeddings as inputs are not supported with speculative decoding or adapters yet: leave "
        "out --enable-prompt-embeds and use_inputs_embeds, or --speculative-config and "
        "--enable-lora.",
        lambda c: c.speculative_config is not None or c.lora_config is not None,
    ),
)
"""Of configurations whose programs take embeddings."""

MODEL_REFUSALS: tuple[tuple[str, Callable[["ModelConfig"], bool]], ...] = (
    (
        "--enforce-eager has nothing to turn off here: every step runs a compiled program. "
        "Leave it out.",
        lambda m: m.enforce_eager,
    ),
    (
        "This kind of model is not built yet; models that generate text or pool are.",
        lambda m: m.runner_type not in ("generate", "pooling"),
    ),
    ("Encoder-decoder models are not built yet.", lambda m: m.is_encoder_decoder),
    ("Multimodal models are not built yet.", lambda m: m.is_multimodal_model),
    ("Multi-head latent attention (MLA) is not built yet.", lambda m: m.use_mla),
    (
        "Models with recurrent or linear-attention state are not built yet.",
        lambda m: m.has_inner_state or m.is_hybrid or m.is_attention_free,
    ),
    ("Sleep mode is not built yet: leave out --enable-sleep-mode.", lambda m: m.enable_sleep_mode),
    (
        "VLLM_RBLN_NUM_HIDDEN_LAYERS is not built yet: unset it, or pass "
        "--hf-overrides '{\"num_hidden_layers\": N}' with a checkpoint of N layers.",
        lambda m: envs.num_hidden_layers() > 0,
    ),
)


def embedding_width(model: "ModelConfig") -> int:
    """Elements of a token's embedding, which some OPTs widen afterwards."""
    return int(getattr(model.hf_config, "word_embed_proj_dim", model.get_hidden_size()))


def refuse_unbuilt(config: "VllmConfig") -> None:
    """ValueError, with the reason and the setting to change, for what cannot be served."""
    refuse_unbuilt_pooling(config)
    # The kind of model first: vLLM itself turns chunked prefill off for some of them.
    for text, applies in MODEL_REFUSALS:
        if applies(config.model_config):
            raise ValueError(text)
    if text := mxfp4.refusal(config):
        raise ValueError(text)
    settle_offload(config)
    settle_lmcache(config)
    embeds = EMBEDS_REFUSALS if takes_embeds(config) else ()
    for refusal in (*REFUSALS, *embeds):
        if refusal.applies(config):
            raise ValueError(refusal.text)
    settle_speculation(config)
    if implementation_of(config) == "transformers" and not is_pooling(config.model_config):
        check_architecture(config.model_config.architectures, Task.GENERATE)


def settle_block_size(config: "VllmConfig", profile: DeviceProfile) -> None:
    """The device's block size unless the user gave one; ValueError for one it cannot use."""
    cache, max_model_len = config.cache_config, config.model_config.max_model_len
    given = cache.block_size if cache.user_specified_block_size else None
    options = options_of(config)
    if isinstance(options, OptimumRBLNConfig):
        overrides = CompileOverrides.of(options.optimum_overrides)
        cache.block_size = overrides.attention_block(given, max_model_len, profile)
    else:
        cache.block_size = profile.block_size_for(max_model_len) if given is None else given
        profile.check_block_size(cache.block_size)


def log_geometry(config: "VllmConfig") -> None:
    """One line at start-up with the sizes everything follows from."""
    geometry = geometry_of(config)
    logger.info_once(
        "Device %s: %s attention, chunk %d, block %d, decode buckets %s, up to %d sequences of "
        "%d tokens, %d programs",
        geometry.profile.name,
        geometry.attention_mode,
        geometry.chunk,
        geometry.block_size,
        ",".join(map(str, geometry.decode_buckets)),
        geometry.max_num_seqs,
        geometry.max_model_len,
        len(geometry.table.programs),
    )
