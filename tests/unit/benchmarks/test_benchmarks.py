# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own arithmetic, and how its engines take turns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drivers, plan, serving, sharing, systems
from benchmarks.costs import Limits, ModelShape, Work, shape_from_config
from benchmarks.drivers import EngineError
from benchmarks.engines.protocol import Settings, execute
from benchmarks.limits import best
from benchmarks.measure import Notes, Session, rotated, take_rounds
from benchmarks.models import RANDOM_CONFIG
from benchmarks.probes import ContextStep, DecodeStep, Prefill
from benchmarks.systems import SYSTEMS, System
from tests.unit.benchmarks.sizes import LIMITS, SMOLLM2


class TestCosts:
    def test_parameters_of_smollm2(self) -> None:
        shape = shape_from_config(SMOLLM2)
        assert shape.head_size == 64
        assert shape.read_parameters == pytest.approx(134.5e6, rel=0.001)
        assert shape.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2

    def test_random_model_has_1_2_billion(self) -> None:
        assert shape_from_config(RANDOM_CONFIG).read_parameters == pytest.approx(1.2e9, rel=0.01)

    def test_decode_reads_weights_once_and_each_sequence_its_own_cache(self) -> None:
        shape = shape_from_config(SMOLLM2)
        one, eight = shape.decode_work(1, 100), shape.decode_work(8, 100)
        assert eight.read_bytes - one.read_bytes == 7 * 100 * shape.kv_bytes_per_token
        assert eight.flop == 8 * one.flop

    def test_prefill_needs_the_output_matrix_once(self) -> None:
        shape = ModelShape(1, 2, 3, 1, 1, 2, vocab=1000)
        small = ModelShape(1, 2, 3, 1, 1, 2, vocab=1)
        extra = shape.prefill_work(50).flop - small.prefill_work(50).flop
        assert extra == 2 * 2 * 999

    def test_slower_limit_decides(self) -> None:
        assert LIMITS.seconds(Work(80e9, 1, 1)) == 1
        assert LIMITS.seconds(Work(1, 1800e9, 1)) == 2

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="positive"):
            Limits(0, 1)
        with pytest.raises(ValueError, match="shape"):
            ModelShape(1, 2, 3, heads=4, kv_heads=3, head_size=2, vocab=5)

    def test_best_of_samples_is_the_limit(self) -> None:
        samples = [
            {"read_gb_s": 80, "matrix_gflop_s": 700},
            {"read_gb_s": 60, "matrix_gflop_s": 900},
        ]
        assert best(samples) == LIMITS


@dataclass
class FakeEngine:
    """Takes one second per prompt token and 0.1 s per new token, whatever the batch."""

    def run(self, batch: int, tokens_in: int, tokens_out: int) -> float:
        return batch * tokens_in + 0.1 * tokens_out

    def steps(self, tokens_in: int, tokens_out: int) -> float:
        return 0.1 + tokens_in / 1000

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return execute(self, command, arguments)


class TestProbes:
    def test_prompt_is_not_in_a_decode_step(self) -> None:
        assert DecodeStep(8).measure(FakeEngine()) == pytest.approx(100)

    def test_prefill_is_a_rate(self) -> None:
        assert Prefill(1024).measure(FakeEngine()) == pytest.approx(1024 / 1024.1)

    def test_context_step_is_in_milliseconds(self) -> None:
        assert ContextStep(400).measure(FakeEngine()) == pytest.approx(500)

    def test_unknown_command_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no command 'fly'"):
            FakeEngine().ask("fly")

    def test_loop_counts_tokens_until_time_is_over(self) -> None:
        answer = FakeEngine().ask("loop", batch=2, tokens_in=3, tokens_out=5, seconds=0.001)
        assert answer["tokens"] > 0
        assert answer["tokens"] % 10 == 0
        assert answer["seconds"] >= 0.001

    def test_settings_survive_the_command_line(self) -> None:
        settings = Settings("/a model", 2048, 32, 2)
        assert Settings.from_json(settings.to_json()) == settings
        with pytest.raises(ValueError, match="at least 1"):
            Settings("m", 0, 1, 1)

    @pytest.mark.parametrize("make", [plan.full, plan.quick])
    def test_names_of_a_plan_are_unique_and_fit_the_engines(self, make: Any) -> None:
        made = make(3)
        assert made.fewer_rounds == 2
        for probes in (made.small, made.context, made.large):
            assert len({probe.name for probe in probes}) == len(probes)
        for probe in made.context:
            assert probe.tokens_in + probe.tokens_out <= plan.CONTEXT.max_model_len


class FakeDriver(FakeEngine):
    """A driver that fails when it is asked for the `fails_at`th time."""

    def __init__(self, name: str, order: list[str], fails_at: int = 10**9) -> None:
        self.system = SYSTEMS[name]
        self.about = {"precision": "bf16"}
        self.order = order
        self.ended = False
        self._left = fails_at

    def __enter__(self) -> FakeDriver:
        if self._left == 0:
            raise EngineError(f"{self.system.name} cannot start")
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True

    def memory_mib(self) -> int:
        return 7

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._left -= 1
        if self._left < 0:
            raise EngineError(f"{self.system.name} broke")
        self.order.append(self.system.name)
        return super().ask(command, **arguments)


class TestRounds:
    def run(self, fakes: list[FakeDriver], notes: Notes, rounds: int = 2) -> Any:
        session = Session(notes)
        with session.started(fakes):  # type: ignore[arg-type]
            return take_rounds(session, [Prefill(8)], rounds, lambda: {"read_gb_s": 1})

    def test_engines_take_turns_and_change_who_is_first(self) -> None:
        order: list[str] = []
        fakes = [FakeDriver(name, order) for name in ("ours", "openvino")]
        taken = self.run(fakes, Notes())
        warm_up, rounds = order[:2], order[2:]
        assert warm_up == ["ours", "openvino"]
        assert rounds == ["ours", "openvino", "openvino", "ours"]
        assert len(taken.samples["prefill_8"]["ours"]) == 2
        assert len(taken.limits) == len(taken.load_average) == 2
        assert all(fake.ended for fake in fakes)

    def test_failed_engine_leaves_a_gap_and_a_note_and_is_ended(self) -> None:
        order: list[str] = []
        broken, fine = FakeDriver("openvino", order, fails_at=2), FakeDriver("ours", order)
        notes = Notes()
        taken = self.run([broken, fine], notes, rounds=3)
        gaps = [value is None for value in taken.samples["prefill_8"]["openvino"]]
        assert gaps == [False, True, True]
        assert None not in taken.samples["prefill_8"]["ours"]
        assert notes.lines == ["openvino broke"]
        assert broken.ended

    def test_engine_that_cannot_start_is_left_out(self) -> None:
        notes = Notes()
        taken = self.run([FakeDriver("openvino", [], 0), FakeDriver("ours", [])], notes)
        assert list(taken.samples["prefill_8"]) == ["ours"]
        assert notes.lines == ["openvino cannot start"]

    def test_rotated(self) -> None:
        assert rotated(["a", "b", "c"], 4) == ["b", "c", "a"]
        assert rotated([], 1) == []


class TestParts:
    def test_client_result(self) -> None:
        result = {name: 1.234 for name in serving.FIGURES.values()}
        assert serving.figures_of({**result, "completed": 8}, 8)["tpot_ms"] == 1.23
        with pytest.raises(EngineError, match="only 7 of 8"):
            serving.figures_of({**result, "completed": 7}, 8)

    def test_share_is_of_the_throughput_alone_around_it(self) -> None:
        assert sharing.shares([100, 50], [[30, 45], [20, 20]]) == [1.0, 0.8]

    def test_memory_of_a_process(self) -> None:
        assert drivers.pss_kib("Rss:  9 kB\nPss:      1234 kB\nPss_Dirty: 5 kB\n") == 1234
        assert drivers.pss_kib("") == 0

    def test_every_system_has_a_driver(self) -> None:
        folder = Path(systems.__file__).parent / "engines"
        assert {f"{s.driver}.py" for s in SYSTEMS.values()} <= {f.name for f in folder.iterdir()}

    def test_missing_environment_says_what_to_do(self) -> None:
        missing = System("x", "X", "ours", "hf", environment="never_made").missing()
        assert missing is not None
        assert "make peers" in missing


def test_settings_row_is_plain_data() -> None:
    assert json.loads(json.dumps(asdict(plan.SMALL)))["max_num_seqs"] == 32
