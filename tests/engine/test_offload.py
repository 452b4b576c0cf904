# SPDX-License-Identifier: Apache-2.0
"""KV offload: prefixes come back from memory and disk with the tokens they would have had.

Between two uses of a prompt the pool forgets it, so that a hit is a load.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm import LLM

from rbln_vllm.core.step import StepKind
from rbln_vllm.distributed.kv_transfer.offload import block_file
from rbln_vllm.distributed.kv_transfer.offload.connector import OffloadingConnector
from rbln_vllm.distributed.kv_transfer.offload.costs import Tier
from rbln_vllm.distributed.kv_transfer.offload.disk_store import DiskStore
from rbln_vllm.distributed.kv_transfer.offload.disk_tier import DiskTier
from rbln_vllm.distributed.kv_transfer.offload.options import LoadPolicy
from rbln_vllm.distributed.kv_transfer.offload.planner import LoadPlanner
from rbln_vllm.distributed.kv_transfer.offload.pool_blocks import PoolBlocks
from rbln_vllm.toolchain import MissingProgramError
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    add,
    check_idle,
    counted_preemptions,
    free_blocks,
    generate,
    greedy,
    prompt,
    recorded_steps,
    run_to_the_end,
    running_engine,
    scheduler_of,
    tokens_of,
    worker_of,
)
from tests.engine.test_drafters import drafted
from tests.engine.test_speculation import DRAFTS, Oracle, drafting, texts_of
from tests.oracle import hf_greedy

NEW, MIB = 6, 1 << 20
# Below, at and above a block and a chunk; a hit ends in a chunk (160) and at its end (192).
LENGTHS = (BLOCK, BLOCK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * BLOCK + 7, 3 * CHUNK + 5)
POOL = {"num_gpu_blocks_override": 12}


def transfer(**options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"load_policy": "always", **options},
    }


def connector_of(llm: LLM) -> OffloadingConnector:
    connector = scheduler_of(llm).connector
    assert isinstance(connector, OffloadingConnector)
    return connector


def planner_of(llm: LLM) -> LoadPlanner:
    planner = connector_of(llm)._planner
    assert planner is not None
    return planner


def settle(llm: LLM) -> None:
    """Steps until every transfer has ended, as an engine in a process of its own does."""
    core, deadline = llm.llm_engine.engine_core.engine_core, time.monotonic() + 60
    while scheduler_of(llm).has_requests():
        core.step_fn()
        time.sleep(0.001)
        assert time.monotonic() < deadline, "transfers do not end"


def forget(llm: LLM, memory: bool = False) -> None:
    """The pool forgets its prefixes; with `memory` so does the memory tier, the disk does not."""
    settle(llm)
    assert scheduler_of(llm).reset_prefix_cache(reset_connector=memory)


def run(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Each prompt alone: its tokens, and how many of its own were loaded."""
    tokens, loaded = [], []
    for item in prompts:
        (output,) = generate(llm, [item], greedy(NEW))
        forget(llm)
        tokens.append(tokens_of(output))
        loaded.append(output.num_cached_tokens or 0)
    return tokens, loaded


def whole_blocks(prompts: list[list[int]]) -> list[int]:
    """What can be loaded: all whole blocks that leave one token to compute."""
    return [BLOCK * ((len(item) - 1) // BLOCK) for item in prompts]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt(length, seed=31) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [x.token_ids for x in hf_greedy(tiny_llama_dir, prompts, NEW, ignore_eos=True)]


@contextmanager
def held_loads() -> Iterator[threading.Event]:
    """Loads into the pool wait for the event."""
    gate, original = threading.Event(), PoolBlocks.load

    def load(pool: PoolBlocks, *arguments: Any) -> None:
        assert gate.wait(60)
        original(pool, *arguments)

    with patch.object(PoolBlocks, "load", load):
        try:
            yield gate
        finally:
            gate.set()


class TestMemory:
    @pytest.fixture(scope="class")
    def llm(self, tiny_llama_dir: Path) -> Iterator[LLM]:
        """By vLLM's short flag, and two rows."""
        config = {"kv_connector_extra_config": {"load_policy": "always"}}
        with running_engine(
            tiny_llama_dir,
            kv_offloading_size=0.0625,
            kv_transfer_config=config,
            max_num_seqs=2,
            **POOL,
        ) as engine:
            yield engine

    def test_a_prefix_comes_back(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        assert run(llm, prompts) == (expected, [0] * len(prompts))
        assert run(llm, prompts) == (expected, whole_blocks(prompts))
        check_idle(llm)

    def test_only_what_the_pool_lacks_is_loaded(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        run(llm, prompts)
        generate(llm, [prompts[-1][: 2 * BLOCK + 1]], greedy(1))  # two blocks stay in the pool
        settle(llm)
        with patch.object(PoolBlocks, "load", autospec=True, side_effect=PoolBlocks.load) as load:
            (output,) = generate(llm, [prompts[-1]], greedy(NEW))
        assert load.call_count == len(prompts[-1]) // BLOCK - 2
        assert tokens_of(output) == expected[-1]
        forget(llm)

    def test_others_decode_while_one_waits_for_its_load(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        run(llm, prompts[-1:])
        with held_loads() as gate, recorded_steps(llm) as steps:
            add(llm, "decodes", prompts[0], greedy(NEW))
            add(llm, "loads", prompts[-1], greedy(NEW))
            outputs: dict[str, Any] = {}
            while not (outputs and outputs["decodes"].finished):
                outputs |= {o.request_id: o for o in llm.llm_engine.step()}
            kinds = [step.plan.kind for step in steps]
            assert "loads" not in outputs
            gate.set()
            outputs |= run_to_the_end(llm)
        last_decode = max(i for i, kind in enumerate(kinds) if kind is StepKind.DECODE)
        assert StepKind.EMPTY not in kinds[:last_decode]
        assert tokens_of(outputs["decodes"]) == expected[0]
        assert tokens_of(outputs["loads"]) == expected[-1]
        assert outputs["loads"].num_cached_tokens == whole_blocks(prompts)[-1]
        forget(llm)

    def test_two_that_want_the_same_are_loaded_once(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        run(llm, prompts[-1:])
        with patch.object(PoolBlocks, "load", autospec=True, side_effect=PoolBlocks.load) as load:
            outputs = generate(llm, [prompts[-1]] * 4, greedy(NEW))
        assert [tokens_of(output) for output in outputs] == expected[-1:] * 4
        assert load.call_count == whole_blocks(prompts)[-1] // BLOCK
        forget(llm)

    def test_abort_during_a_load_gives_its_blocks_back(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        """The notice of the finished load comes when its request is long gone."""
        run(llm, prompts)
        free = free_blocks(llm)
        for _ in range(20):
            with held_loads() as gate:
                add(llm, "gone", prompts[-1], greedy(NEW))
                llm.llm_engine.step()
                assert free_blocks(llm) < free
                llm.llm_engine.abort_request(["gone"])
                llm.llm_engine.step()
                assert free_blocks(llm) < free  # the load still writes to them
                gate.set()
                settle(llm)
            assert free_blocks(llm) == free
            check_idle(llm)
        assert run(llm, prompts)[0] == expected

    def test_abort_at_every_step(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        """Of one request that loads and one that computes what will be stored."""
        run(llm, prompts)
        fresh = prompt(len(prompts[-1]), seed=32)
        for step in range(14):
            add(llm, "loads", prompts[-1], greedy(NEW))
            add(llm, "stays", prompts[-2], greedy(NEW))
            add(llm, "computes", fresh, greedy(NEW))
            outputs = run_to_the_end(
                llm, {step: lambda: llm.llm_engine.abort_request(["loads", "computes"])}
            )
            assert tokens_of(outputs["stays"]) == expected[-2]
            forget(llm)
            check_idle(llm)
        assert run(llm, prompts) == (expected, whole_blocks(prompts))

    def test_a_load_that_fails_is_computed(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        run(llm, prompts)
        with patch.object(PoolBlocks, "load", side_effect=ValueError("injected")) as load:
            tokens, _ = run(llm, prompts)
        assert load.call_count
        assert tokens == expected
        check_idle(llm)
        assert run(llm, prompts) == (expected, whole_blocks(prompts))

    def test_a_store_that_fails_is_a_miss(self, llm: LLM, expected: list[list[int]]) -> None:
        other = prompt(2 * CHUNK + 1, seed=33)
        with patch.object(PoolBlocks, "store", side_effect=ValueError("injected")) as store:
            (first,), _ = run(llm, [other])
        assert store.call_count
        assert run(llm, [other]) == ([first], [0])
        assert run(llm, [other]) == ([first], whole_blocks([other]))

    def test_blocks_of_a_refused_step_are_not_kept(
        self, llm: LLM, prompts: list[list[int]]
    ) -> None:
        """The step that was to compute them had no program."""
        other = prompt(2 * BLOCK + 1, seed=34)
        runner = worker_of(llm).model_runner
        with patch.object(runner, "_model_forward", side_effect=MissingProgramError("none")):
            run_to_the_end_of_refused(llm, other)
        (tokens,), loaded = run(llm, [other])
        assert loaded == [0]
        assert run(llm, [other]) == ([tokens], whole_blocks([other]))

    def test_loading_is_measured_and_declined_where_it_is_slower(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]], vllm_log: list[str]
    ) -> None:
        run(llm, prompts)
        planner = planner_of(llm)
        costs = planner._costs
        assert costs.prefill.per_second()
        assert costs.loads[Tier.MEMORY].per_second()
        planner._policy = LoadPolicy.MEASURED
        try:
            costs.loads[Tier.MEMORY].observe(1.0, 1e9)  # a byte in 30 years
            planner._lines._next = 0.0
            assert run(llm, prompts[-1:]) == (expected[-1:], [0])
        finally:
            planner._policy = LoadPolicy.ALWAYS
        (line,) = [text for text in vllm_log if "loading takes" in text]
        assert "they are computed" in line

    def test_nothing_is_left_of_finished_requests(self, llm: LLM) -> None:
        generate(llm, [prompt(100)], greedy(2))
        settle(llm)
        scheduler = connector_of(llm).connector_scheduler
        assert scheduler is not None
        assert not [*scheduler._req_status, *scheduler._jobs, *scheduler.manager._req_state]
        planner = planner_of(llm)
        assert not [*scheduler._load_began, *planner._ends, *planner._failed]


def run_to_the_end_of_refused(llm: LLM, tokens: list[int]) -> None:
    add(llm, "refused", tokens, greedy(NEW))
    outputs = run_to_the_end(llm)
    assert outputs["refused"].outputs[0].finish_reason == "error"
    forget(llm)


class TestPressure:
    """Preemption while blocks are stored and loaded (the pool has room for half the requests)."""

    @pytest.mark.parametrize("disk", [False, True])
    def test_tokens_stay_right(self, tiny_llama_dir: Path, tmp_path: Path, disk: bool) -> None:
        prompts = [prompt(20 + 3 * seed, seed) for seed in range(8)]
        expected = [x.token_ids for x in hf_greedy(tiny_llama_dir, prompts, 40, ignore_eos=True)]
        tier = {"disk_directory": str(tmp_path)} if disk else {"cpu_bytes_to_use": MIB}
        with running_engine(
            tiny_llama_dir,
            kv_transfer_config=transfer(offload_prompt_only=False, **tier),
            num_gpu_blocks_override=31,
            max_num_seqs=8,
            block_size=8,
            max_model_len=128,
            max_num_batched_tokens=32,
        ) as llm:
            for _ in range(4):
                with counted_preemptions(llm):
                    outputs = generate(llm, prompts, greedy(40))
                assert [tokens_of(output) for output in outputs] == expected
                settle(llm)
                check_idle(llm)
            assert planner_of(llm)._costs.loads[Tier.MEMORY].per_second()


def end_pause(llm: LLM) -> None:
    """Writes are tried again at once after one that failed."""
    scheduler = connector_of(llm).connector_scheduler
    assert scheduler is not None
    tier = scheduler.manager._disk
    assert tier is not None
    tier._no_writes_before = 0.0


def start_empty(llm: LLM, directory: Path) -> None:
    forget(llm, memory=True)
    for path in directory.rglob("*.kv"):
        path.unlink()
    end_pause(llm)


class TestDisk:
    @pytest.fixture(scope="class")
    def directory(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("offload") / "made by the engine"

    @pytest.fixture(scope="class")
    def llm(self, tiny_llama_dir: Path, directory: Path) -> Iterator[LLM]:
        config = transfer(cpu_bytes_to_use=16 * MIB, disk_directory=str(directory))
        with running_engine(tiny_llama_dir, kv_transfer_config=config, **POOL) as engine:
            yield engine

    @pytest.fixture
    def stored(
        self, llm: LLM, directory: Path, prompts: list[list[int]], expected: list[list[int]]
    ) -> list[Path]:
        """The files of all prompts, written now; memory and pool have forgotten them."""
        start_empty(llm, directory)
        assert run(llm, prompts) == (expected, [0] * len(prompts))
        forget(llm, memory=True)
        return sorted(directory.rglob("*.kv"))

    def check_faulty(self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> int:
        """The right tokens, and nothing of them loaded; then all is stored anew."""
        tokens, loaded = run(llm, prompts)
        assert tokens == expected
        check_idle(llm)
        forget(llm, memory=True)
        return sum(loaded)

    def test_a_prefix_comes_back(
        self, llm: LLM, stored: list[Path], prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        assert stored
        assert run(llm, prompts) == (expected, whole_blocks(prompts))
        forget(llm, memory=True)

    @pytest.mark.parametrize("fault", ["changed", "cut off", "empty", "foreign", "swapped"])
    def test_a_damaged_file_is_never_loaded(
        self,
        llm: LLM,
        stored: list[Path],
        prompts: list[list[int]],
        expected: list[list[int]],
        fault: str,
    ) -> None:
        for index, path in enumerate(stored):
            content = bytearray(path.read_bytes())
            if fault == "changed":
                content[block_file.HEADER_BYTES + 7 * index] ^= 1
            elif fault == "foreign":
                content[50] ^= 1
            elif fault == "swapped":
                content = bytearray(stored[index - 1].read_bytes()) if index else content[:-1]
            path.write_bytes(content if fault != "cut off" else content[:-1])
            if fault == "empty":
                path.write_bytes(b"")
        assert self.check_faulty(llm, prompts, expected) == 0
        assert run(llm, prompts) == (expected, whole_blocks(prompts))
        forget(llm, memory=True)

    def test_a_vanished_directory(
        self,
        llm: LLM,
        stored: list[Path],
        directory: Path,
        prompts: list[list[int]],
        expected: list[list[int]],
    ) -> None:
        aside = directory.with_name("unmounted")
        directory.rename(aside)
        assert self.check_faulty(llm, prompts, expected) == 0
        assert not directory.exists()
        aside.rename(directory)
        end_pause(llm)
        assert run(llm, prompts) == (expected, whole_blocks(prompts))
        forget(llm, memory=True)

    def test_files_that_vanish_between_lookup_and_read(
        self, llm: LLM, stored: list[Path], prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        with patch.object(DiskTier, "has", lambda tier, key: True):
            for path in stored:
                path.unlink()
            assert self.check_faulty(llm, prompts, expected) == 0

    def test_a_disk_that_cannot_be_read(
        self, llm: LLM, stored: list[Path], prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        failure = OSError(errno.EIO, "injected")
        with patch.object(os, "readv", side_effect=failure) as readv:
            assert self.check_faulty(llm, prompts, expected) == 0
        assert readv.called

    def test_abort_while_the_disk_is_read(
        self, llm: LLM, stored: list[Path], prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        gate, read, free = threading.Event(), DiskStore.read, free_blocks(llm)

        def held(store: DiskStore, key: bytes, into: memoryview) -> None:
            assert gate.wait(60)
            read(store, key, into)

        with patch.object(DiskStore, "read", held):
            for name in ("gone", "stays"):
                add(llm, name, prompts[-1], greedy(NEW))
            for _ in range(3):
                llm.llm_engine.step()
            llm.llm_engine.abort_request(["gone"])
            llm.llm_engine.step()
            gate.set()
            outputs = run_to_the_end(llm, limit=100_000)
        assert tokens_of(outputs["stays"]) == expected[-1]
        assert outputs["stays"].num_cached_tokens == whole_blocks(prompts)[-1]
        forget(llm, memory=True)
        check_idle(llm)
        assert free_blocks(llm) == free

    def test_a_full_disk(
        self, llm: LLM, directory: Path, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        start_empty(llm, directory)
        with patch.object(os, "write", side_effect=OSError(errno.ENOSPC, "injected")):
            assert run(llm, prompts)[0] == expected
        assert not [p for p in directory.rglob("*") if p.suffix in (".kv", ".tmp")]
        assert self.check_faulty(llm, prompts, expected) > 0  # memory has it
        end_pause(llm)
        assert self.check_faulty(llm, prompts, expected) == 0
        assert run(llm, prompts) == (expected, whole_blocks(prompts))


def test_a_restart_finds_what_was_stored(
    tiny_llama_dir: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    """With the disk alone."""
    config = transfer(disk_directory=str(tmp_path))
    with running_engine(tiny_llama_dir, kv_transfer_config=config, **POOL) as llm:
        run(llm, prompts)
    with running_engine(tiny_llama_dir, kv_transfer_config=config, **POOL) as llm:
        assert run(llm, prompts) == (expected, whole_blocks(prompts))


def test_sliding_windows(tiny_model_dir: Callable[..., Path], prompts: list[list[int]]) -> None:
    """Every layer has a window: stored blocks are then not all of a prompt."""
    model = tiny_model_dir("MistralForCausalLM", sliding_window=64)
    expected = [x.token_ids for x in hf_greedy(model, prompts, NEW, ignore_eos=True)]
    config = transfer(cpu_bytes_to_use=16 * MIB)
    with running_engine(model, kv_transfer_config=config, **POOL) as llm:
        assert run(llm, prompts)[0] == expected
        tokens, loaded = run(llm, prompts)
        assert tokens == expected
        assert sum(loaded) > 0


class TestDrafts:
    """Beside speculation: what is stored are tokens that stand, with the drafter's own KV."""

    @pytest.fixture(scope="class")
    def llm(self, tiny_llama_dir: Path) -> Iterator[LLM]:
        """The drafter is the target, so that every draft stands; a pool of two longest requests."""
        drafts = {
            "method": "draft_model",
            "model": str(tiny_llama_dir),
            "num_speculative_tokens": DRAFTS,
        }
        with running_engine(
            tiny_llama_dir,
            speculative_config=drafts,
            kv_transfer_config=transfer(cpu_bytes_to_use=64 * MIB, offload_prompt_only=False),
            num_gpu_blocks_override=2 * (MAX_LEN // BLOCK) + 1,
        ) as engine:
            yield engine

    def test_a_prefix_comes_back_with_what_the_drafter_knows_of_it(
        self, llm: LLM, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        assert run(llm, prompts) == (expected, [0] * len(prompts))
        with drafted(llm) as seen:
            assert run(llm, prompts) == (expected, whole_blocks(prompts))
        assert seen.accepted == seen.offered > 0
        check_idle(llm)

    def test_drafts_that_were_rejected_are_not_stored(self, llm: LLM) -> None:
        """Of a prompt and its output, drafted at block ends with half of the drafts wrong."""
        tokens, new = prompt(BLOCK - 3, seed=77), 2 * BLOCK + 9
        with drafting(llm, Oracle()):
            (plain,) = generate(llm, [tokens], greedy(new))
            longer = [*tokens, *tokens_of(plain)]
            (after,) = generate(llm, [longer], greedy(NEW))
        forget(llm, memory=True)
        with drafting(llm, Oracle(texts_of([plain, after]), wrong=0.5)):
            (again,) = generate(llm, [tokens], greedy(new))
            forget(llm)
            (loaded,) = generate(llm, [longer], greedy(NEW))
        assert [tokens_of(again), tokens_of(loaded)] == [tokens_of(plain), tokens_of(after)]
        assert loaded.num_cached_tokens == whole_blocks([longer])[0]
        forget(llm, memory=True)

    def test_many_at_once_in_a_pool_that_is_too_small(
        self, llm: LLM, prompts: list[list[int]]
    ) -> None:
        """Blocks are evicted, requests preempted, and both come back from memory."""
        longer = [*prompts, *(prompt(3 * CHUNK, seed=seed) for seed in range(4))]
        with drafting(llm, Oracle()):
            plain = generate(llm, longer, greedy(40))
        forget(llm)
        with (
            counted_preemptions(llm),
            drafting(llm, Oracle(texts_of(plain))),
            patch.object(PoolBlocks, "load", autospec=True, side_effect=PoolBlocks.load) as load,
        ):
            outputs = [generate(llm, longer, greedy(40)) for _ in range(2)]
        for each in outputs:
            assert [tokens_of(o) for o in each] == [tokens_of(o) for o in plain]
        assert load.call_count
        forget(llm, memory=True)
        check_idle(llm)
