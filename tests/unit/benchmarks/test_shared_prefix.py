# SPDX-License-Identifier: Apache-2.0
"""The shared-prefix benchmark: its requests, its slices, its figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import shared_prefix
from benchmarks.measure import Notes
from benchmarks.routing import Answer
from benchmarks.shared_prefix import CONFIGURATIONS, Taken
from benchmarks.systems import SYSTEMS


class Server:
    """Stands for one that is started."""

    def __init__(self, name: str) -> None:
        self.name = name


class TestWorkload:
    def test_requests_share_system_prompts_and_differ_after_them(self) -> None:
        prompts = shared_prefix.workload(200, seed=0)
        shared = Counter(tuple(p[: -shared_prefix.QUESTION_TOKENS]) for p in prompts)
        assert len(prompts) == 200
        assert len(shared) == shared_prefix.SYSTEM_PROMPTS
        assert all(1000 <= len(prefix) <= 3000 for prefix in shared)
        questions = {tuple(p[-shared_prefix.QUESTION_TOKENS :]) for p in prompts}
        assert len(questions) == 200
        longest = max(map(len, prompts)) + shared_prefix.TOKENS_OUT
        assert longest <= shared_prefix.MAX_MODEL_LEN

    def test_the_same_for_every_run(self) -> None:
        assert shared_prefix.workload(9, seed=0) == shared_prefix.workload(9, seed=0)


class TestMeasure:
    def test_each_request_once_and_a_part_where_all_is_computed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, list[int]] = {}
        order: list[str] = []

        def load(server: Any, prompts: list[list[int]]) -> tuple[list[Answer], float]:
            order.append(server.name)
            seen.setdefault(server.name, []).extend(prompt[0] for prompt in prompts)
            return [Answer(0.1, 0.2, 10, 5) for _ in prompts], 1.5

        monkeypatch.setattr(shared_prefix, "_load", load)
        alive: Any = {name: Server(name) for name in ("none", "sub_blocks")}
        taken = shared_prefix.measure(alive, [[number] for number in range(40)], Notes())
        assert sorted(seen["sub_blocks"]) == list(range(40))
        assert len(seen["none"]) == 8
        assert set(seen["none"]) < set(range(40))
        assert order[:4] == ["none", "sub_blocks", "sub_blocks", "none"]
        assert taken["sub_blocks"].seconds == pytest.approx(6.0)

    def test_figures(self) -> None:
        answers = [Answer(0.1, 0.2, 100, 0), Answer(0.3, 0.4, 100, 80)]
        found = shared_prefix.row("blocks", Taken(answers, seconds=4.0))
        assert found["ttft_p50_ms"] == found["ttft_mean_ms"] == 200
        assert found["cached_share"] == 0.4
        assert found["computed_tokens_per_request"] == 60
        assert found["requests_per_s"] == 0.5
        assert found["tokens_out_per_s"] == shared_prefix.TOKENS_OUT / 2
        line = shared_prefix.markdown([found]).splitlines()[-1]
        assert "whole blocks of 128 | 2 | 200" in line


def test_configurations_name_systems_that_exist() -> None:
    assert {one.system for one in CONFIGURATIONS.values()} <= set(SYSTEMS)
    assert len({one.label for one in CONFIGURATIONS.values()}) == len(CONFIGURATIONS)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = shared_prefix.parse(["model", "--configurations", "none", "offload"])
    assert (options.model, options.requests) == (Path("model"), 200)
    assert options.configurations == ["none", "offload"]
    with pytest.raises(SystemExit):
        shared_prefix.parse(["model", "--requests", "5"])
    assert "must be at least" in capsys.readouterr().err
