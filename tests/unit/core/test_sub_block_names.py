# SPDX-License-Identifier: Apache-2.0
"""Names of sub-blocks: what keeps entries apart, and that processes agree."""

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from rbln_vllm.core.kv_cache.chain import HashChain, SubBlockHasher, canonical
from tests.unit.core.cache_driver import names_of
from tests.unit.core.harness import SchedulerFactory, make_request, prompt_of
from tests.unit.core.hits import BLOCK, SUB, driver_of


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=3)
    return MultiModalFeatureSpec(None, "image", identifier, place)


EXTRAS: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "a"},
    "other salt": {"cache_salt": "b"},
    "adapter": {"lora_request": LoRARequest("one", 1, "/one")},
    "adapter of that name, another version": {"lora_request": LoRARequest("one", 1, "/two")},
    "image": {"mm_features": [image("cat", 1)]},
    "other image": {"mm_features": [image("dog", 1)]},
    "image elsewhere": {"mm_features": [image("cat", 2)]},
    "none": {},
}


def chain_of(tokens: list[int], count: int, size: int = SUB, **options: Any) -> HashChain:
    chain = HashChain()
    request = make_request("r", tokens, block=BLOCK, **options)
    SubBlockHasher(size, sha256).extend(chain, request, count)
    return chain


def test_extra_keys_give_every_sub_block_another_name(build: SchedulerFactory) -> None:
    chains = {name: chain_of(prompt_of(12), 3, **extra) for name, extra in EXTRAS.items()}
    for index in range(3):
        assert len({chain.hashes[index] for chain in chains.values()}) == len(EXTRAS)


@pytest.mark.parametrize("name", ["salt", "other salt", "none"])
def test_extra_keys_are_part_of_the_lookup(build: SchedulerFactory, name: str) -> None:
    driver = driver_of(build)
    salted = driver.add("salted", prompt_of(12), max_tokens=1, cache_salt="a")
    other = make_request("other", prompt_of(12), block=BLOCK, **EXTRAS[name])
    while not salted.is_finished():  # the model of the driver knows no salts
        output = driver.scheduler.schedule()
        driver.scheduler.update_from_output(output, driver.runner.execute(output))
    hit = driver.manager.get_computed_blocks(other)[1]
    assert hit == (8 if name == "salt" else 0)


def test_names_are_those_of_vllm_with_blocks_of_that_size(build: SchedulerFactory) -> None:
    """So a router that hashes as vLLM does needs to know the size only."""
    init_none_hash(sha256)
    for extra in EXTRAS.values():
        request = make_request("r", prompt_of(40), block=SUB, **extra)
        assert chain_of(prompt_of(40), 10, **extra).hashes == request.block_hashes
    assert chain_of(prompt_of(40), 10).hashes == names_of(tuple(prompt_of(40)), SUB)
    assert get_request_block_hasher(SUB, sha256)(request) == []


def test_names_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded in another process, without PYTHONHASHSEED."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_none_hash(sha256)
    name = chain_of(list(range(8)), 2, cache_salt="s").hashes[1]
    assert name.hex() == "b151908db6c8e5e283040321b265762c8faa34fcce6e7016f85166966b72ef9b"


def test_equal_strings_are_one_object() -> None:
    parts = [("mm", "".join(["c", "at"]), 0), ("mm", "".join(["ca", "t"]), 4)]
    once = canonical((("mm", "cat", 0), ("mm", "cat", 4)))
    assert sha256(tuple(parts)) != sha256((("mm", "cat", 0), ("mm", "cat", 4)))
    assert sha256(canonical(tuple(parts))) == sha256(once)
    assert canonical(None) is None


def test_a_chain_needs_tokens() -> None:
    with pytest.raises(ValueError, match="fewer than 4 sub-blocks"):
        chain_of(prompt_of(15), 4)
    with pytest.raises(ValueError, match="at least 1 token"):
        SubBlockHasher(0, get_hash_fn_by_name("sha256"))
