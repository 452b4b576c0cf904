# SPDX-License-Identifier: Apache-2.0
"""When programs are compiled, kept, found and refused: whole engines on caches of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from rbln_vllm.models.vllm_builder import VllmModelBuilder
from rbln_vllm.toolchain import CaptureError
from rbln_vllm.worker.program_store import ProgramsMissingError
from tests.engine.engines import (
    CHUNK,
    all_tokens,
    environment,
    free_blocks,
    generate,
    greedy,
    prompt,
    recorded_steps,
    report,
    running_engine,
)
from tests.models import ROOT
from tests.oracle import hf_greedy

# Prefill, decode of 1 and 2, logits of 1, 2 and 64 rows, sampler, draw and mask of 1 and 2 rows.
ALL = 12
PROMPTS = [prompt(5), prompt(CHUNK + 9)]


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("LlamaForCausalLM", num_hidden_layers=1)


@pytest.fixture(scope="module")
def full_cache(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root that holds every program. Copy it to change it."""
    root = tmp_path_factory.mktemp("full-cache")
    start(root, model_dir)
    assert program_files(root)
    return root


@pytest.fixture
def own_cache(full_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(full_cache, tmp_path / "cache"))


@contextmanager
def engine_on(
    root: Path, model_dir: Path, lazy: bool = False, sequences: int = 2, **options: Any
) -> Iterator[LLM]:
    """An engine of few sequences whose cache is `root`; `lazy`: without warm-up."""
    warm_up = "0" if lazy else "1"
    with (
        environment(VLLM_CACHE_ROOT=str(root), VLLM_RBLN_ENABLE_WARM_UP=warm_up),
        running_engine(model_dir, max_num_seqs=sequences, additional_config=options) as llm,
    ):
        yield llm


def start(root: Path, model_dir: Path, **options: Any) -> None:
    """Starts an engine and ends it."""
    with engine_on(root, model_dir, **options):
        pass


def program_files(root: Path) -> list[Path]:
    return sorted((root / "rbln").rglob("programs/*"))


def check_output(llm: LLM, model_dir: Path) -> None:
    expected = hf_greedy(model_dir, PROMPTS, 6, ignore_eos=True)
    outputs = generate(llm, PROMPTS, greedy(6))
    assert all_tokens(outputs) == [item.token_ids for item in expected]


def _no_compile(*_: object) -> None:
    raise CaptureError("cannot be traced")


@pytest.fixture
def no_building(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Building the model fails; the list notes each attempt."""
    attempts: list[str] = []

    def refuse(*_: object) -> None:
        attempts.append("built")
        raise AssertionError("the model was built")

    monkeypatch.setattr(VllmModelBuilder, "__init__", refuse)
    return attempts


class TestWarmStart:
    def test_never_builds_the_model(
        self, full_cache: Path, model_dir: Path, no_building: list[str]
    ) -> None:
        with engine_on(full_cache, model_dir, require_precompiled=True) as llm:
            check_output(llm, model_dir)
            assert report(llm) == {"total": ALL, "compiled_after_ready": 0, "refused": 0}
        assert no_building == []

    def test_the_spy_on_building_fires(
        self, tmp_path: Path, model_dir: Path, no_building: list[str]
    ) -> None:
        with pytest.raises(AssertionError, match=r"the model was built"):
            start(tmp_path, model_dir)
        assert no_building == ["built"]

    def test_the_same_model_at_another_path(
        self, full_cache: Path, model_dir: Path, tmp_path: Path, no_building: list[str]
    ) -> None:
        elsewhere = Path(shutil.copytree(model_dir, tmp_path / "renamed"))
        with engine_on(full_cache, elsewhere, require_precompiled=True) as llm:
            check_output(llm, model_dir)

    def test_a_moved_cache(self, own_cache: Path, model_dir: Path, no_building: list[str]) -> None:
        with engine_on(own_cache, model_dir, require_precompiled=True) as llm:
            check_output(llm, model_dir)


class TestRequirePrecompiled:
    def test_an_empty_cache_is_refused_and_programs_named(
        self, tmp_path: Path, model_dir: Path
    ) -> None:
        with pytest.raises(ProgramsMissingError) as raised:
            start(tmp_path, model_dir, require_precompiled=True)
        text = str(raised.value)
        names = f"prefill_b1_q{CHUNK}, decode_b1_q1, decode_b2_q1, logits_b1_q1"
        assert f"{ALL} programs" in text
        assert names in text
        assert "VLLM_RBLN_COMPILE_ONLY=1" in text
        assert program_files(tmp_path) == []

    def test_another_model_is_refused(
        self, full_cache: Path, tiny_llama_dir: Path, vllm_log: list[str]
    ) -> None:
        with pytest.raises(ProgramsMissingError):
            start(full_cache, tiny_llama_dir, require_precompiled=True)
        (line,) = (line for line in vllm_log if "model_content" in line)
        assert "nearest" in line


class TestWithoutWarmUp:
    def test_programs_compile_at_first_use(self, tmp_path: Path, model_dir: Path) -> None:
        with engine_on(tmp_path, model_dir, lazy=True) as llm:
            assert program_files(tmp_path) == []
            (output,) = generate(llm, PROMPTS[:1], greedy(6))
            assert len(program_files(tmp_path)) == 3  # prefill, decode and logits of one row
            assert report(llm)["compiled_after_ready"] == 3
            check_output(llm, model_dir)
            assert report(llm)["compiled_after_ready"] == 5
        expected = hf_greedy(model_dir, PROMPTS[:1], 6, ignore_eos=True)
        assert all_tokens([output]) == [expected[0].token_ids]

    def test_a_second_start_goes_on_from_what_was_compiled(
        self, tmp_path: Path, model_dir: Path
    ) -> None:
        with engine_on(tmp_path, model_dir, lazy=True) as llm:
            generate(llm, PROMPTS[:1], greedy(2))
        with engine_on(tmp_path, model_dir, lazy=True) as llm:
            generate(llm, PROMPTS[:1], greedy(2))
            assert report(llm)["compiled_after_ready"] == 0
            check_output(llm, model_dir)
            assert report(llm)["compiled_after_ready"] == 2
        assert len(program_files(tmp_path)) == 5

    def test_odd_requests_do_not_run_out_of_programs(self, tmp_path: Path, model_dir: Path) -> None:
        """One sequence at a time and no warm-up: there is no budget of compiles to exceed."""
        odd = [greedy(2), greedy(3, logprobs=20), greedy(1, prompt_logprobs=0), greedy(9, n=1)]
        odd += [SamplingParams(temperature=0.8, max_tokens=3)]
        odd += [greedy(4, min_tokens=2, stop_token_ids=[5]), greedy(4, logit_bias={7: 9.0})]
        lengths = (1, CHUNK, CHUNK + 1, 200)
        with engine_on(tmp_path, model_dir, lazy=True, sequences=1) as llm:
            for length in lengths:
                for params in odd:
                    (output,) = generate(llm, [prompt(length)], params)
                    assert output.outputs[0].finish_reason in ("length", "stop")
            # Prefill, decode, logits of one row and of many, sampler, draw; and no mask.
            assert report(llm)["compiled_after_ready"] == report(llm)["total"] - 1 == 6

    def test_a_program_that_cannot_be_compiled(
        self, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ends the requests that need it, not the engine."""
        with engine_on(tmp_path, model_dir, lazy=True) as llm:
            generate(llm, PROMPTS[:1], greedy(2))
            monkeypatch.setattr(VllmModelBuilder, "compile", _no_compile)
            for output in generate(llm, PROMPTS, greedy(6)):
                assert output.outputs[0].finish_reason == "error"
                assert "cannot be traced" in str(output.outputs[0].stop_reason)
            monkeypatch.undo()
            check_output(llm, model_dir)

    def test_an_entry_removed_meanwhile(
        self, tmp_path: Path, model_dir: Path, vllm_log: list[str]
    ) -> None:
        """`rbln-vllm cache remove` beside a running engine costs a warning, not the engine."""
        with engine_on(tmp_path, model_dir, lazy=True) as llm:
            generate(llm, PROMPTS[:1], greedy(2))
            shutil.rmtree(tmp_path / "rbln")
            check_output(llm, model_dir)
        assert any("kept in memory" in line for line in vllm_log)


class TestStrict:
    @pytest.fixture
    def one_row_cache(self, tmp_path: Path, model_dir: Path) -> Path:
        """Holds what one sequence at a time needs, and no more."""
        with engine_on(tmp_path, model_dir, lazy=True) as llm:
            generate(llm, PROMPTS[:1], greedy(2))
        return tmp_path

    def test_only_requests_without_their_program_end(
        self, one_row_cache: Path, model_dir: Path
    ) -> None:
        with engine_on(one_row_cache, model_dir, lazy=True, strict_programs=True) as llm:
            free = free_blocks(llm)
            with recorded_steps(llm) as steps:
                outputs = generate(llm, PROMPTS, greedy(6))
            assert len(steps[-1].plan.request_ids) == 2  # both decode: there is no such program
            for output in outputs:
                assert output.outputs[0].finish_reason == "error"
                assert "decode_b2_q1" in str(output.outputs[0].stop_reason)
            assert free_blocks(llm) == free
            assert report(llm) == {"total": ALL, "compiled_after_ready": 0, "refused": 2}
            (alone,) = generate(llm, PROMPTS[:1], greedy(6))
        expected = hf_greedy(model_dir, PROMPTS[:1], 6, ignore_eos=True)
        assert all_tokens([alone]) == [expected[0].token_ids]

    def test_prompt_scores_without_their_program(
        self, one_row_cache: Path, model_dir: Path
    ) -> None:
        """The program is missed after the forward pass; the next request is not disturbed."""
        with engine_on(one_row_cache, model_dir, lazy=True, strict_programs=True) as llm:
            (scored,) = generate(llm, PROMPTS[1:], greedy(6, prompt_logprobs=1))
            assert scored.outputs[0].finish_reason == "error"
            assert "logits_b64_q1" in str(scored.outputs[0].stop_reason)
            (plain,) = generate(llm, PROMPTS[1:], greedy(6))
        expected = hf_greedy(model_dir, PROMPTS[1:], 6, ignore_eos=True)
        assert all_tokens([plain]) == [expected[0].token_ids]

    def test_an_empty_cache_refuses_every_request(self, tmp_path: Path, model_dir: Path) -> None:
        with engine_on(tmp_path, model_dir, lazy=True, strict_programs=True) as llm:
            for output in generate(llm, PROMPTS, greedy(2)):
                assert output.outputs[0].finish_reason == "error"
            assert report(llm)["refused"] == 2


class TestDamage:
    @pytest.mark.parametrize("kind", ["programs/*", "weights/*", "rbln_config.json"])
    def test_a_truncated_file_is_rebuilt(
        self, own_cache: Path, model_dir: Path, vllm_log: list[str], kind: str
    ) -> None:
        (damaged, *_) = sorted((own_cache / "rbln").glob(f"*/*/{kind}"))
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[: len(whole) // 2])
        with engine_on(own_cache, model_dir) as llm:
            check_output(llm, model_dir)
            assert report(llm)["compiled_after_ready"] == 0
        assert any("rebuilt" in line for line in vllm_log)
        with engine_on(own_cache, model_dir, require_precompiled=True) as llm:
            check_output(llm, model_dir)


class TestNoCache:
    def test_disabled_leaves_no_files(self, tmp_path: Path, model_dir: Path) -> None:
        with (
            environment(VLLM_DISABLE_COMPILE_CACHE="1"),
            engine_on(tmp_path, model_dir) as llm,
        ):
            check_output(llm, model_dir)
        assert not (tmp_path / "rbln").exists()

    def test_disabled_does_not_read_either(
        self, full_cache: Path, model_dir: Path, no_building: list[str]
    ) -> None:
        disabled = environment(VLLM_DISABLE_COMPILE_CACHE="1")
        with disabled, pytest.raises(AssertionError, match=r"the model was built"):
            start(full_cache, model_dir)

    def test_a_root_that_cannot_be_made(
        self, tmp_path: Path, model_dir: Path, vllm_log: list[str]
    ) -> None:
        (tmp_path / "file").touch()
        with engine_on(tmp_path / "file", model_dir) as llm:
            check_output(llm, model_dir)
        assert any("cannot be written" in line and "VLLM_CACHE_ROOT" in line for line in vllm_log)

    def test_an_entry_that_cannot_be_written(
        self, own_cache: Path, model_dir: Path, vllm_log: list[str]
    ) -> None:
        """As on a read-only share: the root is there, but nothing can be added to it.

        A file stands in the entry's place, since permissions do not bind every user.
        """
        (manifest,) = (own_cache / "rbln").glob("*/*/rbln_config.json")
        content = manifest.parent.parent
        shutil.rmtree(content)
        content.touch()
        with engine_on(own_cache, model_dir) as llm:
            check_output(llm, model_dir)
        assert any("kept in memory" in line for line in vllm_log)


TWO_STARTS = """
from pathlib import Path
from tests.engine.engines import generate, greedy, prompt, report, running_engine, tokens_of
with running_engine(Path({model!r}), max_num_seqs=2) as llm:
    print("TOKENS", tokens_of(generate(llm, [prompt(5)], greedy(6))[0]))
"""


def test_two_processes_start_at_once(tmp_path: Path, model_dir: Path) -> None:
    """Both succeed: one compiles, the other waits for it or finds its programs."""
    code = TWO_STARTS.format(model=str(model_dir))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path), "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    (expected,) = hf_greedy(model_dir, [prompt(5)], 6, ignore_eos=True)
    for output in outputs:
        assert f"TOKENS {expected.token_ids}" in output
    assert sum("Compiling" in output for output in outputs) == 1
    assert len(program_files(tmp_path)) == ALL
