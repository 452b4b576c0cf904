# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own arithmetic, tables, and care for the processes it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drivers, plan, plots, report, serving, sharing, systems
from benchmarks.costs import Limits, ModelShape, Work, shape_from_config
from benchmarks.drivers import Driver, EngineError
from benchmarks.engines.protocol import Settings, execute
from benchmarks.limits import best
from benchmarks.measure import Notes, Session, rotated, take_rounds
from benchmarks.models import RANDOM_CONFIG
from benchmarks.probes import ContextStep, DecodeStep, Prefill, describe
from benchmarks.systems import SYSTEMS, System

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
LIMITS = Limits(bytes_per_s=80e9, flop_per_s=900e9)


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


def section(samples: dict[str, Any], probes: list[Any]) -> dict[str, Any]:
    shape = shape_from_config(SMOLLM2)
    return {
        "probes": [describe(probe, shape) for probe in probes],
        "samples": samples,
        "systems": {name: {} for name in next(iter(samples.values()))},
        "memory_mib": {"ours": 1500},
        "limits": [{"read_gb_s": 80, "matrix_gflop_s": 900, "matrix_kind": "bf16"}],
    }


class TestReport:
    row = report.Row("step", False, Work(80e6, 1, 1), {"ours": [2, 4, None], "openvino": [6, 4, 9]})

    def test_medians_and_ratios_use_the_rounds_that_have_both(self) -> None:
        assert self.row.median("ours") == 3
        assert self.row.median("vllm_cpu") is None
        assert self.row.ratios("openvino") == [3, 1]

    def test_a_time_below_zero_has_no_ratio_and_no_share(self) -> None:
        row = report.Row("step", False, Work(1, 1, 1), {"ours": [-2, 4], "openvino": [6, 8]})
        assert row.ratios("openvino") == [2]
        below = report.Row("step", False, Work(1, 1, 1), {"ours": [-2]})
        assert below.share("ours", LIMITS) is None

    def test_rates_turn_ratios_and_shares_round(self) -> None:
        rate = report.Row("rate", True, Work(80e9, 1, 1000), {"ours": [500.0], "openvino": [250.0]})
        assert rate.ratios("openvino") == [2]
        assert rate.at_limit(LIMITS) == 1000
        assert rate.share("ours", LIMITS) == 0.5
        assert self.row.at_limit(LIMITS) == pytest.approx(1)
        assert self.row.share("ours", LIMITS) == pytest.approx(1 / 3)

    def test_comparison(self) -> None:
        data = section(
            {"decode_b1": {"ours": [5.0, 7.0], "openvino": [10.0, 14.0]}}, [DecodeStep(1)]
        )
        assert report.comparison(data).splitlines() == [
            "|  | limit | rbln-vllm | OpenVINO GenAI |",
            "| --- | --- | --- | --- |",
            "| decode step, batch 1 (ms) | 3.42 | **6.00** (57 % of limit) "
            "| 12.0 (2.00x; 2.0 to 2.0) |",
            "| memory after that (MiB) | - | 1,500 | - |",
        ]

    def test_comparison_without_limits_or_ours(self) -> None:
        data = section({"decode_b1": {"ours": [None], "openvino": [10.0]}}, [DecodeStep(1)])
        assert report.comparison({**data, "limits": []}).splitlines()[-2] == (
            "| decode step, batch 1 (ms) | - | **-** (- of limit) | 10.0 |"
        )

    def test_limits_are_those_of_the_section(self) -> None:
        slow = section({"decode_b1": {"ours": [5.0]}}, [DecodeStep(1)])
        slow["limits"] = [
            {"read_gb_s": rate, "matrix_gflop_s": 9, "matrix_kind": "x"} for rate in (20, 40)
        ]
        found = report.tables(
            {
                "sections": {
                    "decode": slow,
                    "large": section({"decode_b1": {"ours": [5.0]}}, [DecodeStep(1)]),
                }
            }
        )
        assert found["limits"] == (
            "Limits: decode reading 40 GB/s, x 9 GFLOP/s; large reading 80 GB/s, bf16 900 GFLOP/s."
        )
        assert report.limits_of(slow) == Limits(40e9, 9e9)

    def test_growth_is_paired_within_rounds(self) -> None:
        probes = [ContextStep(128), ContextStep(4096)]
        data = section(
            {"context_128": {"ours": [4.0, 9.0]}, "context_4096": {"ours": [6.0, 11.0]}}, probes
        )
        last = report.growth(data).splitlines()[-1]
        assert last == "| batch 1, context 4,096 | 1.14 | 2.00 (57 % of bandwidth) |"

    def test_starts(self) -> None:
        rows = [
            {"kind": "cold", "start_seconds": 9, "ready_seconds": 12, "memory_mib": 700},
            {"kind": "warm", "start_seconds": 4, "ready_seconds": 7, "memory_mib": 900},
        ]
        last = report.starts({"starts": {"ours": rows}}).splitlines()[-1]
        assert last == "| rbln-vllm | 9.00 | 12.0 | 4.00 | 7.00 | 800 |"

    def test_serving_and_sharing(self) -> None:
        keys = ("ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s")
        figures = dict(zip(keys, (30, 50, 5, 6, 190), strict=True))
        table = report.serving({"loads": {"8": {"ours": [figures], "vllm_cpu": []}}})
        assert table.splitlines()[2:] == [
            "| 8 | rbln-vllm | 30.0 | 50.0 | 5.00 | 6.00 | 190 |",
            "| 8 | vLLM CPU | - | - | - | - | - |",
        ]
        shared = {"alone_tokens_per_s": [100], "together_tokens_per_s": [[40, 50]], "shares": [0.9]}
        assert report.sharing(shared).splitlines()[-1] == "| 100 | 40.0 + 50.0 | 90 % |"
        assert report.sharing({}) == "not measured"

    def test_tables_of_a_whole_run(self) -> None:
        decode = section({"decode_b1": {"ours": [5.0]}}, [DecodeStep(1)])
        found = report.tables({"sections": {"decode": decode, "sharing": {}}})
        assert set(found) == {"limits", "peers", "sharing"}
        assert found["limits"] == "Limits: decode reading 80 GB/s, bf16 900 GFLOP/s."
        assert "not measured" in report.limits_text({"sections": {}})

    def test_only_what_stands_between_markers_is_replaced(self) -> None:
        page = "a\n<!-- peers -->\nold\n<!-- end peers -->\nb\n<!-- limits -->\nno end"
        filled = report.fill(page, {"peers": "new", "limits": "x", "absent": "y"})
        assert filled == page.replace("old", "new")
        assert report.fill(filled, {"peers": "new"}) == filled

    def test_uneven_table_is_refused(self) -> None:
        with pytest.raises(ValueError, match="as many cells"):
            report.markdown_table(["a", "b"], [["1"]])

    def test_numbers(self) -> None:
        shown = [report.number(value) for value in (None, 0.123, 45.67, -3.0, 12345.6)]
        assert shown == ["-", "0.12", "45.7", "-3.00", "12,346"]

    def test_series_of_a_plot(self) -> None:
        data = section(
            {
                "decode_b1": {"ours": [4.0]},
                "decode_b8": {"ours": [None]},
                "prefill_9": {"ours": [1]},
            },
            [DecodeStep(1), DecodeStep(8), Prefill(9)],
        )
        found = plots.series(report.rows_of(data), "decode_b", lambda row: row.median("ours"))
        assert found == ([1], [4.0])


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


CHILD = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def answer(**content): print(json.dumps(content), flush=True)
answer(ready=True, child=child.pid)
for line in sys.stdin:
    command = json.loads(line)
    if command["command"] == "die":
        print("reason of death", file=sys.stderr)
        sys.exit(3)
    if command["command"] == "answer":
        answer(got=command["value"])
"""


@dataclass(frozen=True)
class ScriptSystem(System):
    """A system whose driver is a script given here."""

    script: str = CHILD

    def command(self, settings: str) -> list[str]:
        return [sys.executable, "-S", "-c", self.script]


def state(pid: int) -> str:
    """One letter as in ps, or nothing when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for_state(pid: int, *expected: str) -> None:
    """Wait until it is in one of these states."""
    end = time.monotonic() + 60
    while (found := state(pid)) not in expected:
        assert time.monotonic() < end, f"process {pid} is {found!r}, not one of {expected}"
        time.sleep(0.005)


class TestDriver:
    @pytest.fixture
    def driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
        monkeypatch.setattr(drivers, "LOGS", tmp_path)
        system = ScriptSystem("script", "Script", "ours", "hf")
        return Driver(system, Settings("m", 1, 1, 1), seconds=60)

    def test_engine_is_stopped_while_it_is_not_asked(self, driver: Driver) -> None:
        with driver:
            child = driver.about["child"]
            wait_for_state(child, "T")
            assert driver.ask("answer", value=7) == {"got": 7}
            driver.send("wait")
            wait_for_state(child, "S")
        wait_for_state(child, "", "Z")

    def test_answer_that_does_not_come(self, driver: Driver) -> None:
        with driver:
            driver.send("wait")
            with pytest.raises(EngineError, match="Script has given no answer for 0 s"):
                driver.receive(0.05)

    def test_driver_that_dies_tells_why_and_leaves_nobody(self, driver: Driver) -> None:
        with driver:
            child = driver.about["child"]
            with pytest.raises(EngineError, match="Script has ended\nreason of death"):
                driver.ask("die")
        wait_for_state(child, "", "Z")

    def test_memory_counts_the_whole_group(self, driver: Driver) -> None:
        with driver:
            assert driver.about["memory_mib"] > 0


def test_settings_row_is_plain_data() -> None:
    assert json.loads(json.dumps(asdict(plan.SMALL)))["max_num_seqs"] == 32


def test_group_that_ignores_its_end_is_killed() -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True)
    os.killpg(process.pid, signal.SIGSTOP)
    drivers.end_stopped_group(process, grace=0.05)
    assert process.returncode == -signal.SIGKILL
