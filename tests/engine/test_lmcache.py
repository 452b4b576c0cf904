# SPDX-License-Identifier: Apache-2.0
"""KV that LMCache keeps in memory: hits, lost chunks, requests that end early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from rbln_vllm.toolchain import MissingProgramError
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    add,
    check_idle,
    generate,
    greedy,
    prompt,
    run_to_the_end,
    runner_of,
    scheduler_of,
    tokens_of,
)
from tests.engine.lmcache_engines import (
    KEPT,
    LONG,
    MEMORY,
    ask,
    forget_everything,
    forget_pool,
    lmcache_engine,
    lmcache_layers,
    lmcache_of,
)
from tests.oracle import hf_greedy

pytest.importorskip("lmcache", reason="the package lmcache is not installed")

from rbln_vllm.distributed.kv_transfer.lmcache import worker_side


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Chunks in memory alone."""
    with lmcache_engine(tiny_llama_dir, tmp_path_factory.mktemp("memory"), MEMORY) as engine:
        yield engine


EDGES = sorted({1, 2} | {size + d for size in (KEPT, BLOCK, CHUNK, 3 * BLOCK) for d in (-1, 0, 1)})


@pytest.mark.parametrize("length", [*EDGES, 5 * KEPT, LONG, MAX_LEN - 7])
def test_hits_of_a_repeated_prompt(llm: LLM, length: int) -> None:
    tokens = prompt(length, seed=1)
    cold, computed_before = ask(llm, tokens)
    forget_pool(llm)
    warm, cached = ask(llm, tokens)
    assert computed_before == 0
    assert cached == min(length // KEPT * KEPT, length - 1)
    assert warm == cold


def test_a_longer_hit_continues_the_pools_own(llm: LLM) -> None:
    tokens = prompt(LONG, seed=2)
    cold, _ = ask(llm, tokens)
    forget_pool(llm)
    ask(llm, tokens[: 2 * BLOCK + 1])  # the pool has two blocks again
    before = [layer.clone() for layer in lmcache_layers()]
    held = [b.block_id for b in block_pool(llm).blocks if b.block_hash is not None]
    warm, cached = ask(llm, tokens)
    assert (warm, cached) == (cold, LONG // KEPT * KEPT)
    for old, new in zip(before, lmcache_layers(), strict=True):
        assert new[held].equal(old[held]), "blocks that the pool had are left alone"


def block_pool(llm: LLM) -> Any:
    return scheduler_of(llm).kv_cache_manager.block_pool


def test_a_hit_gives_the_text_of_another_implementation(llm: LLM, tiny_llama_dir: Path) -> None:
    tokens = prompt(LONG, seed=3)
    ask(llm, tokens)
    forget_pool(llm)
    warm, cached = ask(llm, tokens)
    assert cached > 0
    assert warm == hf_greedy(tiny_llama_dir, [tokens], 6, ignore_eos=True)[0].token_ids


def test_salts_are_kept_apart(llm: LLM) -> None:
    tokens = prompt(LONG, seed=4)
    found = []
    for salt in (None, "a", "b", "a", "b", None):
        forget_pool(llm)
        found.append(ask(llm, tokens, **({"cache_salt": salt} if salt else {}))[1])
    whole = LONG // KEPT * KEPT
    assert found == [0, 0, 0, whole, whole, whole]


def test_reset_of_the_connector(llm: LLM) -> None:
    tokens = prompt(LONG, seed=5)
    ask(llm, tokens)
    forget_everything(llm)
    assert ask(llm, tokens)[1] == 0


def test_a_step_that_was_not_computed_is_not_stored(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(LONG, seed=6)

    def refuse(*_: Any, **__: Any) -> Any:
        raise MissingProgramError("refused by a test")

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm), "_model_forward", refuse)
        (output,) = generate(llm, [tokens], greedy(6))
    assert output.outputs[0].finish_reason == "error"
    forget_pool(llm)
    _, cached = ask(llm, tokens)
    assert cached == 0


def test_abort_at_every_step_of_a_hit(llm: LLM) -> None:
    """Whoever ends, and when: the others are as they were, and nothing stays pinned."""
    tokens = [prompt(LONG, seed=7 + index) for index in range(6)]  # two more than rows
    expected = [ask(llm, each)[0] for each in tokens]
    for step in range(12):
        forget_pool(llm)
        names = [add(llm, str(i), each, greedy(6)) for i, each in enumerate(tokens)]
        abort = partial(llm.llm_engine.abort_request, names[1::2], internal=True)
        outputs = run_to_the_end(llm, {step: abort})
        generate(llm, [prompt(2, seed=99)], greedy(1))  # orders go with a step
        assert not lmcache_of().lookup_pins
        check_idle(llm)
        for index in (0, 2, 4):
            assert tokens_of(outputs[str(index)]) == expected[index]


def test_abort_after_the_lookup(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that finds chunks and then no blocks waits with its chunks pinned."""
    tokens = prompt(LONG, seed=15)
    ask(llm, tokens)
    forget_pool(llm)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_of(llm).kv_cache_manager, "allocate_slots", lambda *_, **__: None)
        name = add(llm, "waits", tokens, greedy(6))
        llm.llm_engine.step()
        assert lmcache_of().lookup_pins
        llm.llm_engine.abort_request([name], internal=True)
    ask(llm, prompt(2, seed=99))


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_chunks_that_vanish_after_they_were_looked_up(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """What could not be loaded is computed, and nothing built on it is kept."""
    tokens = prompt(LONG, seed=20 + keep)
    cold, _ = ask(llm, tokens)
    forget_pool(llm)
    with monkeypatch.context() as patch:
        patch.setattr(worker_side.WorkerSide, "_load", lose_chunks(keep))
        assert ask(llm, tokens)[0] == cold
    assert ask(llm, tokens)[0] == cold
    forget_pool(llm)
    assert ask(llm, tokens) == (cold, LONG // KEPT * KEPT)


def test_what_was_computed_on_lost_chunks_is_not_stored(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(LONG, seed=24)
    cold, _ = ask(llm, tokens)
    forget_everything(llm)
    ask(llm, tokens[: 4 * KEPT])  # the step that loads these computes the chunk after them
    forget_pool(llm)
    with monkeypatch.context() as patch:
        patch.setattr(worker_side.WorkerSide, "_load", lose_chunks(0))
        assert ask(llm, tokens)[0] == cold
    forget_pool(llm)
    assert ask(llm, tokens) == (cold, LONG // KEPT * KEPT)


def lose_chunks(keep: int) -> Callable[..., None]:
    """A load during which all chunks but the first `keep` are lost, and the pool holds rubbish."""
    load = worker_side.WorkerSide._load

    def lossy(self: worker_side.WorkerSide, request: Any) -> None:
        for layer in self._layers:
            layer[(request.slot_mapping // BLOCK).unique()] = 100.0
        backend = self._engine.storage_manager.storage_backends["LocalCPUBackend"]
        for key in list(backend.hot_cache)[keep:]:
            backend.remove(key)
        load(self, request)

    return lossy


def test_an_aborted_request_leaves_no_rubbish_in_the_prefix_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream keeps the hashes of blocks that were to be computed again."""
    tokens = prompt(LONG, seed=30)
    cold, _ = ask(llm, tokens)
    forget_pool(llm)
    with monkeypatch.context() as patch:
        patch.setattr(worker_side.WorkerSide, "_load", lose_chunks(0))
        name = add(llm, "lost", tokens, greedy(6))
        llm.llm_engine.step()
        llm.llm_engine.abort_request([name], internal=True)
        run_to_the_end(llm)
    assert not [block for block in block_pool(llm).blocks if block.block_hash is not None]
    assert ask(llm, tokens) == (cold, 0)
