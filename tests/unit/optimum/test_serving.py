# SPDX-License-Identifier: Apache-2.0
"""A compiled directory's values take the place of the engine's arguments, and each is logged."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.config import OptimumRBLNConfig
from rbln_vllm.devices import HOST, resolve_profile
from rbln_vllm.optimum.serving import (
    check_compiled_programs,
    compiled_path,
    take_over,
    upstream_rank,
)
from tests.unit.lora.test_stored import parts_of, write
from tests.unit.optimum.test_directory import change, compiled

__all__ = ["compiled"]  # a fixture
TAKEN = "in the compiled model, not {}: the compiled model's value is used"
LOGGER = logging.getLogger("aot.serving")


def arguments(model: Path, **given: Any) -> Any:
    none = dict.fromkeys(("max_num_seqs", "max_model_len", "block_size", "max_num_batched_tokens"))
    said = {"dtype": "auto", "hf_overrides": None, "runner": "auto", "enable_prompt_embeds": False}
    plain = {**said, "enable_lora": None}
    return SimpleNamespace(**{"model": str(model), **none, **plain, **given})


def test_the_artifact_fills_what_is_not_given(
    compiled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(compiled)
    with caplog.at_level(logging.INFO):
        config = take_over(args, OptimumRBLNConfig().as_resolved(), HOST, LOGGER)
    assert not caplog.messages
    assert (args.max_num_seqs, args.max_model_len, args.block_size) == (4, 256, 32)
    assert (args.max_num_batched_tokens, args.dtype) == (64, "float32")
    assert args.runner == "generate"
    assert config.is_resolved
    assert config.optimum_overrides == {"decoder_batch_sizes": [4, 1]}
    assert compiled_path(SimpleNamespace(additional_config=config)) == compiled
    assert take_over(args, config, HOST, LOGGER) == config  # as engine processes do


def test_every_change_is_logged(compiled: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(compiled, max_num_seqs=8, block_size=64, dtype="bfloat16", max_model_len=256)
    config = OptimumRBLNConfig(optimum_overrides={"batch_size": 8, "decoder_batch_sizes": [4, 1]})
    with caplog.at_level(logging.INFO):
        take_over(args, config, HOST, LOGGER)
    assert (args.max_num_seqs, args.block_size, args.dtype) == (4, 32, "float32")
    assert caplog.messages == [
        f"--max-num-seqs is 4 {TAKEN.format(8)}",
        f"--block-size is 32 {TAKEN.format(64)}",
        f"--dtype is float32 {TAKEN.format('bfloat16')}",
        "optimum_overrides {'batch_size': 8} have no effect on a compiled model",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_num_batched_tokens": 128}, "128 is not the prefill chunk of the compiled model, 64"),
        ({"hf_overrides": {"vocab_size": 3}}, "--hf-overrides cannot change a compiled model"),
        ({"runner": "pooling"}, "was compiled for RBLNLlamaForCausalLM: leave it out, or compile"),
    ],
)
def test_what_cannot_be_overwritten_is_refused(
    compiled: Path, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        take_over(arguments(compiled, **given), OptimumRBLNConfig(), HOST, LOGGER)
    take_over(arguments(compiled, max_num_batched_tokens=64), OptimumRBLNConfig(), HOST, LOGGER)


@pytest.mark.parametrize(
    ("compiled_for", "asked", "words"),
    [
        (0, {"method": "ngram", "num_speculative_tokens": 3}, "--num-speculative-tokens 3"),
        (2, {"method": "suffix", "num_speculative_tokens": 3}, "for 2 drafts, not for 3: set num"),
        (2, {"method": "draft_model", "num_speculative_tokens": 2}, "use ngram or suffix, or"),
    ],
)
def test_drafts_that_were_not_compiled(
    compiled: Path, compiled_for: int, asked: dict[str, Any], words: str
) -> None:
    change(
        compiled,
        lambda d: d["model"]["rbln_config"].update(num_speculative_tokens=compiled_for),
    )
    config = OptimumRBLNConfig(cached_model_path=str(compiled))
    finished: Any = SimpleNamespace(
        additional_config=config, speculative_config=SimpleNamespace(**asked)
    )
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        check_compiled_programs(finished)
    assert str(compiled) in str(caught.value)


def test_embeddings_are_what_was_compiled(compiled: Path) -> None:
    args = arguments(compiled, enable_prompt_embeds=True)
    with pytest.raises(ValueError, match="take token ids: leave it out, or compile it anew with"):
        take_over(args, OptimumRBLNConfig(), HOST, LOGGER)
    change(compiled, lambda d: d["model"]["rbln_config"].update(use_inputs_embeds=True))
    kept = {"decoder_batch_sizes": [4, 1], "use_inputs_embeds": True}
    for asked in (False, True):
        args = arguments(compiled, enable_prompt_embeds=asked)
        config = take_over(args, OptimumRBLNConfig(), HOST, LOGGER)
        assert config.optimum_overrides == kept
        assert args.enable_prompt_embeds is asked


def test_another_device_is_refused(compiled: Path) -> None:
    profile = resolve_profile("RBLN-CR03")
    with pytest.raises(ValueError, match="was compiled for HOST, not for RBLN-CR03"):
        take_over(arguments(compiled), OptimumRBLNConfig(), profile, LOGGER)


def test_any_other_model_is_left_alone(tmp_path: Path) -> None:
    args, config = arguments(tmp_path, max_num_seqs=8), OptimumRBLNConfig()
    assert take_over(args, config, HOST, LOGGER) is config
    assert args.max_num_seqs == 8
    assert compiled_path(SimpleNamespace(additional_config=config)) is None


LORA = {
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 16,
    "lora_target_modules": None,
}


def test_adapters_and_the_flag_go_together(compiled: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="was compiled without adapters: leave it out, compile"):
        take_over(arguments(compiled, **LORA), OptimumRBLNConfig(), HOST, LOGGER)
    adapted = write(tmp_path / "adapted", {number: parts_of(number) for number in (1, 2)})
    words = f"was compiled with the adapters sql, chat: give --enable-lora.*NAME={adapted}"
    with pytest.raises(RuntimeError, match=words):
        take_over(arguments(adapted), OptimumRBLNConfig(), HOST, LOGGER)


def test_the_slots_and_the_rank_are_the_directory_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapted = write(tmp_path, {number: parts_of(number) for number in (1, 2)})
    args = arguments(adapted, **LORA)
    with caplog.at_level(logging.INFO):
        take_over(args, OptimumRBLNConfig(), HOST, LOGGER)
    assert not said(caplog)
    # Two adapters of up to rank 4, for which vLLM has rank 8.
    assert (args.max_loras, args.max_lora_rank, args.lora_target_modules) == (2, 8, None)
    given = {"max_loras": 3, "max_lora_rank": 32, "lora_target_modules": ["q_proj"]}
    with caplog.at_level(logging.INFO):
        take_over(arguments(adapted, **{**LORA, **given}), OptimumRBLNConfig(), HOST, LOGGER)
    assert said(caplog) == [
        f"--max-loras is 2 {TAKEN.format(3)}",
        f"--max-lora-rank is 8 {TAKEN.format(32)}",
        f"--lora-target-modules is None {TAKEN.format(['q_proj'])}",
    ]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By us: to import vLLM says more."""
    return [record.getMessage() for record in caplog.records if record.name == LOGGER.name]


@pytest.mark.parametrize(("rank", "known"), [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_ranks_that_vllm_has(rank: int, known: int) -> None:
    assert upstream_rank(rank) == known


def test_a_rank_that_vllm_has_not() -> None:
    with pytest.raises(ValueError, match="smaller max_lora_rank"):
        upstream_rank(513)
