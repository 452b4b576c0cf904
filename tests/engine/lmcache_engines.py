# SPDX-License-Identifier: Apache-2.0
"""Engines whose KV LMCache keeps. A process has one KV connector, so one of them at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group

from tests.engine.engines import (
    check_idle,
    environment,
    generate,
    greedy,
    prompt,
    running_engine,
    scheduler_of,
    tokens_of,
)

TRANSFER = {"kv_connector": "RBLNLMCacheConnectorV1", "kv_role": "kv_both"}
KEPT = 24
"""Tokens of a chunk of LMCache: it divides neither a block nor a prefill chunk."""
LONG = 200
MEMORY = {"local_cpu": "true"}


@contextmanager
def lmcache_engine(
    model_dir: Path, directory: Path, settings: dict[str, str], **arguments: Any
) -> Iterator[LLM]:
    """An engine whose KV LMCache keeps as `settings` say."""
    file = directory / "lmcache.yaml"
    lines = {"chunk_size": str(KEPT), "max_local_cpu_size": "0.05", **settings}
    file.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    try:
        with (
            environment(LMCACHE_CONFIG_FILE=str(file)),
            running_engine(model_dir, kv_transfer_config=TRANSFER, **arguments) as llm,
        ):
            yield llm
    finally:
        ensure_kv_transfer_shutdown()  # a process has one connector, also after a failed start


def on_disk(directory: Path) -> dict[str, str]:
    return {"local_cpu": "false", "local_disk": str(directory), "max_local_disk_size": "0.05"}


def lmcache_of() -> Any:
    """LMCache's engine, which lives in this process."""
    return get_kv_transfer_group()._worker._engine


def disk_of() -> Any:
    """LMCache's disk backend, which is ours."""
    return lmcache_of().storage_manager.storage_backends["LocalDiskBackend"]


def forget_pool(llm: LLM) -> None:
    assert llm.reset_prefix_cache()


def forget_everything(llm: LLM) -> None:
    """Also what LMCache keeps; it does so with the next step, so one is made."""
    assert scheduler_of(llm).reset_prefix_cache(reset_connector=True)
    generate(llm, [prompt(2, seed=99)], greedy(1))


def ask(llm: LLM, tokens: list[int], **more: Any) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt's were not computed."""
    inputs: Any = [{"prompt_token_ids": tokens, **more}]
    (output,) = llm.generate(inputs, greedy(6), use_tqdm=False)
    check_idle(llm)
    assert not lmcache_of().lookup_pins, "a chunk is pinned, and nobody is left to need it"
    return tokens_of(output), output.num_cached_tokens or 0


def written(directory: Path, count: int) -> list[Path]:
    """The files of chunks, when LMCache's threads have written `count`."""
    end = time.monotonic() + 60
    while True:
        files = sorted(directory.rglob("*.kv"))
        if len(files) >= count and not disk_of().disk_worker.put_tasks:
            return files
        assert time.monotonic() < end, f"{len(files)} chunks on disk instead of {count}"
        time.sleep(0.05)


def lmcache_layers() -> list[Any]:
    return list(get_kv_transfer_group()._worker._layers)
