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
from rbln_vllm.optimum.serving import compiled_path, take_over
from tests.unit.test_optimum_directory import compiled

__all__ = ["compiled"]  # a fixture
TAKEN = "in the compiled model, not {}: the compiled model's value is used"
LOGGER = logging.getLogger("aot.serving")


def arguments(model: Path, **given: Any) -> Any:
    none = dict.fromkeys(("max_num_seqs", "max_model_len", "block_size", "max_num_batched_tokens"))
    return SimpleNamespace(
        **{"model": str(model), **none, "dtype": "auto", "hf_overrides": None, **given}
    )


def test_the_artifact_fills_what_is_not_given(
    compiled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(compiled)
    with caplog.at_level(logging.INFO):
        config = take_over(args, OptimumRBLNConfig().as_resolved(), HOST, LOGGER)
    assert not caplog.messages
    assert (args.max_num_seqs, args.max_model_len, args.block_size) == (4, 256, 32)
    assert (args.max_num_batched_tokens, args.dtype) == (64, "float32")
    assert config.is_resolved
    assert config.optimum_overrides == {"decoder_batch_sizes": [4, 1]}
    assert compiled_path(SimpleNamespace(additional_config=config)) == compiled  # type: ignore[arg-type]
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
    ],
)
def test_what_cannot_be_overwritten_is_refused(
    compiled: Path, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        take_over(arguments(compiled, **given), OptimumRBLNConfig(), HOST, LOGGER)
    take_over(arguments(compiled, max_num_batched_tokens=64), OptimumRBLNConfig(), HOST, LOGGER)


def test_another_device_is_refused(compiled: Path) -> None:
    profile = resolve_profile("RBLN-CR03")
    with pytest.raises(ValueError, match="was compiled for HOST, not for RBLN-CR03"):
        take_over(arguments(compiled), OptimumRBLNConfig(), profile, LOGGER)


def test_any_other_model_is_left_alone(tmp_path: Path) -> None:
    args, config = arguments(tmp_path, max_num_seqs=8), OptimumRBLNConfig()
    assert take_over(args, config, HOST, LOGGER) is config
    assert args.max_num_seqs == 8
    assert compiled_path(SimpleNamespace(additional_config=config)) is None  # type: ignore[arg-type]
