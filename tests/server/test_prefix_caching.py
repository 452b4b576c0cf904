# SPDX-License-Identifier: Apache-2.0
"""Cached tokens as clients and operators see them: in usage, in /metrics, once per request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.live import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    LiveServer,
    prompt,
    running_server,
    serve_arguments,
)

SUB = 8
SEQS, POOL_BLOCKS = 8, 17
"""More sequences than the pool has room for once they have grown."""


@pytest.fixture(scope="module")
def caching_server(
    tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    arguments = serve_arguments(
        tiny_llama_dir,
        max_num_seqs=SEQS,
        num_gpu_blocks_override=POOL_BLOCKS,
        rbln_sub_block_size=SUB,
    )
    log_file = tmp_path_factory.mktemp("caching-server") / "log"
    with running_server([*arguments, "--enable-prompt-tokens-details"], log_file) as server:
        yield server
    assert f"Sub-block prefix caching enabled: block_size={BLOCK}, sub_block_size={SUB}" in (
        log_file.read_text()
    )


@pytest.fixture
def server(caching_server: LiveServer) -> Iterator[LiveServer]:
    yield caching_server
    caching_server.wait_until_idle()


def hits(length: int) -> int:
    return SUB * ((length - 1) // SUB)


def counted(server: LiveServer) -> tuple[int, int]:
    """Tokens asked of the prefix cache so far, and those found, without preempted requests."""
    server.tokens(prompt(1), max_tokens=1)  # whatever was queued before has been counted by now
    metrics = server.metrics()
    return (
        int(metrics["vllm:prefix_cache_queries_total"]),
        int(metrics["vllm:prefix_cache_hits_total"]),
    )


def cached_tokens(server: LiveServer, tokens: list[int], stream: bool = False) -> int:
    """Of the usage that a completion ends with."""
    if stream:
        options = {"include_usage": True}
        usage = list(server.stream(tokens, max_tokens=2, stream_options=options))[-1].usage
    else:
        usage = server.complete(tokens, max_tokens=2).usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return 0 if details is None or details.cached_tokens is None else details.cached_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_usage_tells_cached_tokens(server: LiveServer, stream: bool) -> None:
    for length in (1, SUB, SUB + 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, MAX_LEN - 2):
        tokens = prompt(length, seed=61 + stream)
        assert cached_tokens(server, tokens, stream) == 0
        assert cached_tokens(server, tokens, stream) == hits(length)


def test_metrics_count_a_request_once_however_many_chunks(server: LiveServer) -> None:
    length = 3 * CHUNK + 20
    tokens = prompt(length, seed=63)
    before = counted(server)
    for _ in range(3):
        server.tokens(tokens, max_tokens=4)
    after = counted(server)
    assert after[0] - before[0] == 3 * length + 1, "the 1 is that of the last look"
    assert after[1] - before[1] == 2 * hits(length)


def test_metrics_under_preemption(server: LiveServer) -> None:
    """Neither waiting for blocks nor coming back counts a second time."""
    prompts = [prompt(20, seed=70 + index) for index in range(2 * SEQS)]
    before, preempted = counted(server), server.metrics()["vllm:num_preemptions_total"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda tokens: server.tokens(tokens, max_tokens=100), prompts))
    after = counted(server)
    assert server.metrics()["vllm:num_preemptions_total"] > preempted
    assert after[0] - before[0] == sum(map(len, prompts)) + 1
    assert after[1] == before[1], "no two prompts share a sub-block"
