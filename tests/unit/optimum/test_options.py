# SPDX-License-Identifier: Apache-2.0
"""Options of the ahead-of-time API: three forms, unknown ones, and those that are not built."""

import re
from typing import Any

import pytest

from rbln_vllm.config.unbuilt import UNBUILT
from rbln_vllm.optimum.options import RBLNModelConfig, given_options, split_keywords


@pytest.mark.parametrize(
    "base", [{"batch_size": 2, "max_seq_len": 64}, RBLNModelConfig(batch_size=2, max_seq_len=64)]
)
def test_keywords_win_over_the_config(base: Any) -> None:
    merged = RBLNModelConfig.merged(base, {"rbln_batch_size": 4, "rbln_decoder_batch_sizes": [1]})
    assert given_options(merged) == {
        "batch_size": 4,
        "max_seq_len": 64,
        "decoder_batch_sizes": (1,),
    }


def test_nothing_given_is_nothing_set() -> None:
    assert given_options(RBLNModelConfig.merged(None, {})) == {}


def test_keywords_are_ours_or_hugging_faces() -> None:
    assert split_keywords({"rbln_npu": "RBLN-CR03", "revision": "main"}) == (
        {"rbln_npu": "RBLN-CR03"},
        {"revision": "main"},
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"max_model_len": 4}, "rbln_config: max_model_len is unknown; known are batch_size"),
        ({"dtype": "float32"}, "dtype is an argument of from_pretrained"),
        ({"num_devices": 2}, "num_devices 2: one worker over several devices"),
        ({"lora_config": {}}, "lora_config has no adapters: name one"),
        ({"lora_config": {"rank": 4}}, "lora_config: rank is unknown; known are adapters, max_"),
        ({"use_inputs_embeds": 1}, "use_inputs_embeds: Input should be a valid boolean"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: Input should be greater than 0"),
        ({"attn_impl": "sdpa"}, "attn_impl: Input should be 'eager' or 'flash_attn'"),
        ({"create_runtimes": 1}, "create_runtimes: Input should be a valid boolean"),
    ],
)
def test_what_cannot_be_is_refused(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        RBLNModelConfig.of(entries)


@pytest.mark.parametrize("name", UNBUILT)
def test_asking_for_nothing_is_taken(name: str) -> None:
    for value in UNBUILT[name].accepted:
        assert given_options(RBLNModelConfig.of({name: value})) == {}
    with pytest.raises(ValueError, match=f"rbln_config: {name} 7: "):
        RBLNModelConfig.of({name: 7})


def test_another_type_is_no_config() -> None:
    with pytest.raises(TypeError, match=r"must be a RBLNModelConfig or a mapping.*not list"):
        RBLNModelConfig.merged([], {})  # type: ignore[arg-type]
