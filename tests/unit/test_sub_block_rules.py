# SPDX-License-Identifier: Apache-2.0
"""When sub-blocks are on, of what size, and how a size that cannot work is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.config import RBLNConfig
from rbln_vllm.core.kv_cache.rules import SubBlockRules, check_prefix_caching, is_seeded_per_process
from rbln_vllm.devices import HOST, PROFILES

CR03, CR13 = PROFILES["RBLN-CR03"], PROFILES["RBLN-CR13"]
NPU = SubBlockRules(explicit=None, enabled=True, chunk=512, block_size=8192, profile=CR03)
ON_HOST = SubBlockRules(explicit=None, enabled=True, chunk=256, block_size=128, profile=HOST)


@pytest.mark.parametrize(
    ("rules", "size"),
    [
        (NPU, 512),
        (replace(NPU, profile=CR13), 512),
        (ON_HOST, 16),
        (replace(ON_HOST, block_size=16), None),  # no sub-block is smaller than the block
        (replace(ON_HOST, block_size=24), None),
        (replace(ON_HOST, block_size=32), 16),
        (replace(ON_HOST, chunk=15), None),
        (replace(ON_HOST, chunk=16), 16),
        (replace(ON_HOST, enabled=False), None),
        (replace(NPU, block_size=512), None),
        (replace(NPU, block_size=1024), 512),
        (replace(NPU, chunk=1024, block_size=512), None),
        (replace(NPU, chunk=384), None),  # does not divide the block
    ],
)
def test_the_default_is_used_where_it_fits(rules: SubBlockRules, size: int | None) -> None:
    assert rules.settle() == size


def test_layers_can_turn_the_default_off() -> None:
    assert ON_HOST.settle("the layers keep a state") is None
    with pytest.raises(ValueError, match="8 cannot be used: the layers keep a state"):
        replace(ON_HOST, explicit=8).settle("the layers keep a state")


@pytest.mark.parametrize(
    ("rules", "rule"),
    [
        (replace(ON_HOST, explicit=8, enabled=False), "no-enable-prefix-caching"),
        (replace(ON_HOST, explicit=257), "larger than the chunk .* 256"),
        (replace(NPU, explicit=256), "on RBLN-CR03 it must be the chunk .* 512"),
        (replace(NPU, explicit=512, block_size=256), "block_size 256 must not be smaller"),
        (replace(ON_HOST, explicit=128), "smaller than block_size, 128"),
        (replace(ON_HOST, explicit=127), "divide block_size, 128"),
        (replace(ON_HOST, explicit=48), "divide block_size, 128"),
    ],
)
def test_an_explicit_size_is_refused_by_its_rule(rules: SubBlockRules, rule: str) -> None:
    with pytest.raises(
        ValueError, match=f"sub_block_size {rules.explicit} cannot be used: .*{rule}"
    ):
        rules.settle()


@pytest.mark.parametrize(
    ("rules", "size"),
    [(replace(NPU, explicit=128, profile=CR13), 128), (replace(ON_HOST, explicit=64), 64)],
)
def test_cr13_and_host_take_less_than_a_chunk(rules: SubBlockRules, size: int) -> None:
    assert rules.settle() == size


def config_of(**changes: Any) -> Any:
    values = {
        "algorithm": "sha256",
        "caching": True,
        "events": None,
        "transfer": None,
        "offloading": None,
        "options": RBLNConfig(),
    } | changes
    return SimpleNamespace(
        additional_config=values["options"],
        cache_config=SimpleNamespace(
            enable_prefix_caching=values["caching"],
            block_size=128,
            prefix_caching_hash_algo=values["algorithm"],
            kv_offloading_size=values["offloading"],
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=256,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
        ),
        model_config=SimpleNamespace(max_model_len=1024),
        kv_events_config=values["events"],
        kv_transfer_config=values["transfer"],
    )


@pytest.mark.parametrize(
    "options",
    [{"enable_sub_block_cache": False, "sub_block_size": 16}, {"sub_block_size": 48}],
)
def test_the_configuration_is_checked(options: dict[str, Any]) -> None:
    check_prefix_caching(config_of())
    with pytest.raises(ValueError, match="cannot be used"):
        check_prefix_caching(config_of(options=RBLNConfig(**options)))


def test_an_explicit_size_needs_prefix_caching() -> None:
    check_prefix_caching(config_of(caching=False))
    with pytest.raises(ValueError, match="leave out --no-enable-prefix-caching"):
        check_prefix_caching(config_of(caching=False, options=RBLNConfig(sub_block_size=16)))


@pytest.mark.parametrize(
    "sharing",
    [
        {"events": SimpleNamespace(enable_kv_cache_events=True)},
        {"transfer": object()},
        {"offloading": 1.0},
    ],
)
def test_hashes_of_one_process_are_not_shared(
    sharing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_prefix_caching(config_of(algorithm="xxhash"))
    check_prefix_caching(config_of(**sharing))
    with pytest.raises(ValueError, match="xxhash_cbor is seeded anew in every process"):
        check_prefix_caching(config_of(algorithm="xxhash_cbor", **sharing))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_prefix_caching(config_of(algorithm="xxhash_cbor", **sharing))


def test_which_hashes_are_seeded_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert not is_seeded_per_process("sha256")
    assert not is_seeded_per_process("sha256_cbor")
    assert is_seeded_per_process("xxhash")
