# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused at start, in words that say what to change.

Most refusals need no engine: they are rules of the finished configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from tests.engine.engines import (
    MAX_LEN,
    all_tokens,
    check_idle,
    environment,
    generate,
    greedy,
    prompt,
    running_engine,
    tokens_of,
)
from tests.oracle import hf_greedy

# Leaves the sizes to the device.
UNSET: dict[str, Any] = dict.fromkeys(
    ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len")
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
EMBEDS = {"model_impl": "transformers", "enable_prompt_embeds": True}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
OFFLOAD = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@dataclass(frozen=True)
class Refused:
    """`arguments` under `variables` are refused, and the text holds every one of `words`."""

    words: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(f"{k}={v}" for k, v in {**self.arguments, **self.variables}.items())


def _options(**fields: Any) -> dict[str, Any]:
    return {"additional_config": fields}


def _refusal(attempt: Callable[[], object]) -> str:
    """The text of the ValueError that `attempt` must raise."""
    with pytest.raises(ValueError, match=r".") as raised:
        attempt()
    return str(raised.value)


def _start(model_dir: Path, **arguments: Any) -> None:
    with running_engine(model_dir, **arguments):
        pass


def _device(name: str) -> dict[str, str]:
    return {"RBLN_FORCE_NPU_NAME": name}


NOT_BUILT = (
    Refused(("--tensor-parallel-size 1",), {"tensor_parallel_size": 2}),
    Refused(("--pipeline-parallel-size 1",), {"pipeline_parallel_size": 2}),
    Refused(("--data-parallel-size 1",), {"data_parallel_size": 2}),
    Refused(("--lora-dtype",), {"enable_lora": True, "lora_dtype": "float16"}),
    Refused(("--enforce-eager", "compiled program"), {"enforce_eager": True}),
    Refused(("--no-enable-chunked-prefill",), {"enable_chunked_prefill": False}),
    Refused(("fp8", "--kv-cache-dtype"), {"kv_cache_dtype": "fp8"}),
    Refused(("Quantised", "unquantised model"), {"quantization": "fp8"}),
    Refused(("--load-format bitsandbytes",), {"load_format": "bitsandbytes"}),
    Refused(("LlamaForCausalLM is not built for pooling",), {"runner": "pooling"}),
    Refused(("--enable-prompt-embeds", "or --model-impl vllm"), {"enable_prompt_embeds": True}),
    Refused(
        ("Embeddings as inputs", "--speculative-config"),
        {**EMBEDS, "speculative_config": NGRAM},
    ),
    Refused(("Embeddings as inputs", "--enable-lora"), {**EMBEDS, "enable_lora": True}),
    Refused(
        ("narrower than its hidden states",),
        {**EMBEDS, "hf_overrides": {"word_embed_proj_dim": 32}},
    ),
    Refused(("--kv-transfer-config",), {"kv_transfer_config": CONNECTOR}),
    Refused(("kv_both",), {"kv_transfer_config": {**OFFLOAD, "kv_role": "kv_consumer"}}),
    Refused(("--kv-offloading-size",), {"kv_transfer_config": OFFLOAD}),
    Refused(("--cpu-offload-gb",), {"cpu_offload_gb": 1.0}),
    Refused(("--offload-group-size",), {"offload_group_size": 1}),
    Refused(("Sleep mode",), {"enable_sleep_mode": True}),
    Refused(("--max-model-len", "-1 is auto"), {"max_model_len": -1}),
    Refused(("RBLN_HOST_EXECUTOR", "native or reference"), variables={"RBLN_HOST_EXECUTOR": "gpu"}),
    Refused(("Model runner V2",), variables={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    Refused(
        ("NUM_HIDDEN_LAYERS", "--hf-overrides"), variables={"VLLM_RBLN_NUM_HIDDEN_LAYERS": "1"}
    ),
)


def _drafts(**fields: Any) -> dict[str, Any]:
    return {"speculative_config": {**NGRAM, **fields}}


SPECULATION = (
    Refused(
        ("Unsupported speculative decoding method 'ngram_gpu'", "ngram, suffix"),
        _drafts(method="ngram_gpu"),
    ),
    Refused(("num_speculative_tokens is 33", "at most 32"), _drafts(num_speculative_tokens=33)),
    Refused(
        ("num_speculative_tokens is 129", "at most 128"),
        {**_drafts(num_speculative_tokens=129), **_options(use_custom_sampler=False)},
    ),
    Refused(("draft_sample_method", "greedy"), _drafts(draft_sample_method="probabilistic")),
    Refused(("rejection_sample_method", "standard"), _drafts(rejection_sample_method="block")),
    Refused(
        ("num_speculative_tokens_per_batch_size",),
        _drafts(num_speculative_tokens_per_batch_size=[(1, 4, 2)]),
    ),
    Refused(("parallel_drafting",), _drafts(parallel_drafting=True)),
)

IMPLEMENTATION_AND_OPTIONS = (
    Refused(("Cannot use FLASH_ATTN backend",), {"attention_backend": "FLASH_ATTN"}),
    Refused(("Cannot use CPU_ATTN backend",), {"attention_backend": "CPU_ATTN"}),
    Refused(
        ("--max-num-batched-tokens 100", "multiple of 64"),
        {"model_impl": "optimum", "max_num_batched_tokens": 100},
    ),
    Refused(
        ("optimum_overrides", "--max-num-seqs is 4, the override 2"),
        {
            "model_impl": "optimum",
            "max_num_seqs": 4,
            "additional_config": {"optimum_overrides": {"batch_size": 2}},
        },
    ),
    Refused(
        ("optimum_overrides: num_devices 8", "is not built yet", "leave it out or give 1"),
        {"model_impl": "optimum", "additional_config": {"optimum_overrides": {"num_devices": 8}}},
    ),
    Refused(("'nonsense'", "auto, vllm, transformers, optimum"), {"model_impl": "nonsense"}),
    Refused(("unknown field", "nonsense", "max_prefill_run"), _options(nonsense=1)),
    Refused(("use_w8a8", "fp8", "--rbln-use-w8a8"), _options(use_w8a8=True)),
    Refused(
        ("[1, 2]", "largest decode batch 16"),
        _options(decode_batch_bucket_strategy="manual", decode_batch_bucket_manual_buckets=[1, 2]),
    ),
    Refused(("max_prefill_run", "greater than or equal to 0"), _options(max_prefill_run=-1)),
)

DEVICES = (
    Refused(
        ("RBLN-CX99", "HOST", "RBLN-CA02", "RBLN-CA25", "RBLN-CR13"),
        variables=_device("RBLN-CX99"),
    ),
    Refused(
        ("rebel100: a --block-size", "from 1024 to 16384"),
        {"model_impl": "optimum", "block_size": 256},
        _device("RBLN-CR03"),
    ),
    Refused(
        ("RBLN-CA02 cannot run the vllm implementation", "use --model-impl optimum"),
        {"model_impl": "vllm"},
        _device("RBLN-CA02"),
    ),
    Refused(("block_size 12", "multiple of 8"), {"block_size": 12}),
    Refused(
        ("block_size 256", "power of two from 512 to 16384"),
        {"block_size": 256},
        _device("RBLN-CR03"),
    ),
    Refused(("block_size 768", "power of two"), {"block_size": 768}, _device("RBLN-CR03")),
    Refused(("block_size 32768",), {"block_size": 32768}, _device("RBLN-CR13")),
    Refused(
        ("VLLM_RBLN_COMPILE_ONLY", "VLLM_DISABLE_COMPILE_CACHE", "Unset one"),
        variables={"VLLM_RBLN_COMPILE_ONLY": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"},
    ),
    Refused(("VLLM_CPU_KVCACHE_SPACE", "'much'"), variables={"VLLM_CPU_KVCACHE_SPACE": "much"}),
)


@pytest.mark.parametrize(
    "case",
    NOT_BUILT + SPECULATION + IMPLEMENTATION_AND_OPTIONS + DEVICES,
    ids=lambda case: case.name,
)
def test_refused_in_words(tiny_llama_dir: Path, case: Refused) -> None:
    args = EngineArgs(model=str(tiny_llama_dir), **{"model_impl": "vllm", **case.arguments})
    with environment(**case.variables):
        text = _refusal(args.create_engine_config)
    for word in case.words:
        assert word in text


def test_a_package_that_a_drafter_needs(tiny_llama_dir: Path) -> None:
    drafts = {"method": "suffix", "num_speculative_tokens": 4}
    args = EngineArgs(model=str(tiny_llama_dir), speculative_config=drafts)
    with patch("vllm.utils.import_utils.has_arctic_inference", return_value=False):
        text = _refusal(args.create_engine_config)
    assert "arctic-inference 0.1.1" in text
    assert "docs/speculation.md" in text


def test_lmcache_beside_drafts(tiny_llama_dir: Path) -> None:
    connector = {"kv_connector": "RBLNLMCacheConnectorV1", "kv_role": "kv_both"}
    args = EngineArgs(model=str(tiny_llama_dir), kv_transfer_config=connector, **_drafts())
    with patch("rbln_vllm.distributed.kv_transfer.lmcache.rules.is_installed", return_value=True):
        text = _refusal(args.create_engine_config)
    assert "RBLNLMCacheConnectorV1 is not supported with speculative decoding yet" in text
    assert "--kv-offloading-size" in text


def test_the_same_arguments_without_the_fault_are_accepted(tiny_llama_dir: Path) -> None:
    config = EngineArgs(model=str(tiny_llama_dir)).create_engine_config()
    assert (config.cache_config.block_size, config.scheduler_config.max_num_seqs) == (128, 16)
    assert config.scheduler_config.max_num_batched_tokens == 256


MODELS = (
    ("MambaForCausalLM", {"model_type": "mamba"}, "recurrent"),
    ("Qwen3NextForCausalLM", {"model_type": "qwen3_next"}, "recurrent or linear-attention"),
    ("DeepseekV2ForCausalLM", {"model_type": "deepseek_v2"}, "latent attention"),
    ("ModernBertModel", {"model_type": "modernbert"}, "is not built for pooling"),
    ("WhisperForConditionalGeneration", {"model_type": "whisper"}, "Encoder-decoder"),
)


@pytest.mark.parametrize(("architecture", "fields", "words"), MODELS, ids=str)
def test_kinds_of_model_that_are_not_built(
    tmp_path: Path, architecture: str, fields: dict[str, Any], words: str
) -> None:
    config = AutoConfig.for_model(**fields)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=128)
    with pytest.raises(ValueError, match=words):
        args.create_engine_config()


def test_device_defaults_of_a_dry_run(tiny_llama_dir: Path) -> None:
    with environment(**_device("RBLN-CR03")):
        config = EngineArgs(model=str(tiny_llama_dir), model_impl="vllm").create_engine_config()
    assert config.scheduler_config.max_num_seqs == 1
    assert config.scheduler_config.max_num_batched_tokens == 512
    assert config.cache_config.block_size == 512  # the longest power of two in 512 positions
    assert config.cache_config.gpu_memory_utilization == 0.93


def test_atom_takes_the_transformers_implementation(tiny_llama_dir: Path) -> None:
    with environment(**_device("RBLN-CA25")):
        config = EngineArgs(model=str(tiny_llama_dir)).create_engine_config()
    assert config.scheduler_config.max_num_batched_tokens == 128
    assert config.cache_config.block_size == 512  # all positions: naive attention


TOO_SMALL = (
    ({"num_gpu_blocks_override": 1}, 0),
    ({"num_gpu_blocks_override": 8}, 224),
    # A block of two layers is 2 * 2 heads * 32 tokens * 2 * 32 floats: 32 KiB.
    ({"kv_cache_memory_bytes": 8 * 32 * 1024}, 224),
    ({"kv_cache_memory_bytes": 1024}, 0),
)


@pytest.mark.parametrize(("arguments", "fits"), TOO_SMALL, ids=str)
def test_a_pool_below_one_sequence_is_refused(
    tiny_llama_dir: Path, arguments: dict[str, int], fits: int
) -> None:
    """256 tokens need 8 blocks of 32 and the reserved one; the text says what fits."""
    text = _refusal(lambda: _start(tiny_llama_dir, **arguments))
    assert f"The largest --max-model-len that fits is {fits}." in text
    assert "until the pool has 9 blocks" in text


def test_a_pool_of_exactly_one_sequence(tiny_llama_dir: Path) -> None:
    """One token below the pool is served; the pool and one above get the limit in words."""
    with running_engine(tiny_llama_dir, num_gpu_blocks_override=9) as llm:
        for length in (MAX_LEN, MAX_LEN + 1):
            with pytest.raises(VLLMValidationError, match=rf"{MAX_LEN}"):
                generate(llm, [prompt(length)], greedy(1))
            tokens = prompt(MAX_LEN - 1, seed=length)
            (output,) = generate(llm, [tokens], greedy(1))
            assert tokens_of(output) == hf_greedy(tiny_llama_dir, [tokens], 1)[0].token_ids
        check_idle(llm)


def test_more_kv_memory_than_the_machine_has_is_refused(tiny_llama_dir: Path) -> None:
    with environment(VLLM_CPU_KVCACHE_SPACE="100000.5"):
        text = _refusal(lambda: _start(tiny_llama_dir))
    assert "asked to take 100000.50 GiB" in text
    assert "lower VLLM_CPU_KVCACHE_SPACE" in text


def test_block_ids_beyond_the_device_are_refused(tiny_llama_dir: Path) -> None:
    arguments = {"block_size": 512, "num_gpu_blocks_override": 32_769}
    with environment(**_device("RBLN-CR03")):
        text = _refusal(lambda: _start(tiny_llama_dir, **arguments))
    assert "block ids end at 32767" in text


def test_a_dry_run_serves_within_the_limits_of_its_device(
    tiny_llama_dir: Path, vllm_log: list[str]
) -> None:
    prompts = [prompt(length) for length in (5, 300, 511)]
    with environment(**_device("RBLN-CR03")), running_engine(tiny_llama_dir, **UNSET) as llm:
        config = llm.llm_engine.vllm_config
        assert (config.scheduler_config.max_num_seqs, config.cache_config.block_size) == (1, 512)
        outputs = generate(llm, prompts, greedy(1))
    expected = hf_greedy(tiny_llama_dir, prompts, 1)
    assert all_tokens(outputs) == [item.token_ids for item in expected]
    assert sum("Dry run of RBLN-CR03" in line for line in vllm_log) == 1
