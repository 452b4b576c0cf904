# SPDX-License-Identifier: Apache-2.0
"""What an artifact remembers of the attention layers is what vLLM would have asked for."""

import json

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from rbln_vllm.models.kv_layers import KVLayer, layers_from_json, layers_to_json

COMMON = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(**COMMON), SlidingWindowSpec(**COMMON, sliding_window=128)]
)
def test_spec_survives_the_manifest(spec: FullAttentionSpec) -> None:
    layer = KVLayer.from_spec("model.layers.0.attn", 8, spec)
    (loaded,) = layers_from_json(json.loads(json.dumps(layers_to_json((layer,)))))
    assert loaded == layer
    assert loaded.spec(32) == spec


def test_block_shape_holds_keys_and_values() -> None:
    layer = KVLayer.from_spec("a", 8, FullAttentionSpec(**COMMON))
    heads, tokens, pair = layer.block_shape(32)
    assert heads * tokens * pair * 2 == FullAttentionSpec(**COMMON).page_size_bytes


def test_other_caches_are_refused_in_words() -> None:
    spec = MambaSpec(block_size=32, shapes=((1,),), dtypes=(torch.float32,))
    with pytest.raises(NotImplementedError, match="MambaSpec, which is not built yet"):
        KVLayer.from_spec("a", 8, spec)


def test_heads_must_group() -> None:
    with pytest.raises(ValueError, match="multiple of KV heads"):
        KVLayer("a", 3, 2, 64, "bfloat16", 0)
