# SPDX-License-Identifier: Apache-2.0
"""Engines with LMCache: restarts, preemption, and starts that must fail in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engines import (
    check_idle,
    counted_preemptions,
    environment,
    generate,
    greedy,
    prompt,
    tokens_of,
)
from tests.engine.lmcache_engines import (
    KEPT,
    LONG,
    MEMORY,
    TRANSFER,
    ask,
    forget_pool,
    lmcache_engine,
    on_disk,
    written,
)
from tests.oracle import hf_greedy

pytest.importorskip("lmcache", reason="the package lmcache is not installed")

from rbln_vllm.distributed.kv_transfer.lmcache import worker_side


def test_preemption(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Resumed requests load what LMCache has of them, or compute it again."""
    prompts = [prompt(20, seed) for seed in range(8)]
    expected = [x.token_ids for x in hf_greedy(tiny_llama_dir, prompts, 40, ignore_eos=True)]
    sizes = {"block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 32}
    settings = {**MEMORY, "chunk_size": "5", "save_unfull_chunk": "true"}
    with lmcache_engine(
        tiny_llama_dir,
        tmp_path,
        settings,
        max_num_seqs=8,
        num_gpu_blocks_override=31,
        **sizes,
    ) as llm:
        for _ in range(2):
            with counted_preemptions(llm):
                outputs = generate(llm, prompts, greedy(40))
            assert [tokens_of(output) for output in outputs] == expected
            check_idle(llm)
            forget_pool(llm)
        _, cached = ask(llm, prompts[0])
        assert cached == 19, "an unfull chunk is stored and found"


def test_restart(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Another engine finds what is on disk, though Python hashes differently there."""
    tokens = prompt(LONG, seed=60)
    store = tmp_path / "store"
    with (
        environment(PYTHONHASHSEED="1"),
        lmcache_engine(tiny_llama_dir, tmp_path, on_disk(store)) as llm,
    ):
        cold, cached = ask(llm, tokens)
        written(store, LONG // KEPT)
        assert cached == 0
    with (
        environment(PYTHONHASHSEED="2"),
        lmcache_engine(tiny_llama_dir, tmp_path, on_disk(store)) as llm,
    ):
        assert ask(llm, tokens) == (cold, LONG // KEPT * KEPT)


def test_start_fails_when_lmcache_cannot_start(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache itself goes on, and never hits."""
    from lmcache.v1.lookup_client.factory import LookupClientFactory

    def fail(*_: Any) -> None:
        raise RuntimeError("no lookup for a test")

    monkeypatch.setattr(LookupClientFactory, "create_lookup_server", fail)
    with pytest.raises(RuntimeError, match=r"never store anything(?s:.*)no lookup for a test"):
        start(tiny_llama_dir, tmp_path, MEMORY)


def test_start_fails_without_a_transfer(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no transfer for a test")

    monkeypatch.setattr(worker_side, "PoolTransfer", fail)
    with pytest.raises(RuntimeError, match="no transfer for a test"):
        start(tiny_llama_dir, tmp_path, MEMORY)


def test_start_fails_when_the_disk_cannot_be_used(tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"LocalDiskBackend(?s:.*)local_disk can be written"):
        start(tiny_llama_dir, tmp_path, on_disk(tmp_path / "file" / "below"))


def test_start_refuses_settings(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_layerwise: programs run all layers at once"):
        start(tiny_llama_dir, tmp_path, {**MEMORY, "use_layerwise": "true"})


def start(model_dir: Path, directory: Path, settings: dict[str, str]) -> None:
    with lmcache_engine(model_dir, directory, settings):
        pass


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ({**TRANSFER, "kv_role": "kv_producer"}, '"kv_role": "kv_both"'),
        ({**TRANSFER, "kv_connector_extra_config": {"use_native": True}}, "use_native"),
    ],
)
def test_refused_transfer_configurations(
    tiny_llama_dir: Path, transfer: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        EngineArgs(model=str(tiny_llama_dir), kv_transfer_config=transfer).create_engine_config()


def test_the_missing_package_is_named(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rbln_vllm.distributed.kv_transfer.lmcache.rules.is_installed", lambda: False
    )
    args = EngineArgs(model=str(tiny_llama_dir), kv_transfer_config=TRANSFER)
    with pytest.raises(ValueError, match=r"rbln-vllm\[kv_connectors\]"):
        args.create_engine_config()


def test_steps_are_not_scheduled_ahead(tiny_llama_dir: Path) -> None:
    """What a step ahead builds on a failed load would be sent to the client."""
    config = EngineArgs(
        model=str(tiny_llama_dir), kv_transfer_config=TRANSFER
    ).create_engine_config()
    assert not config.scheduler_config.async_scheduling
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
