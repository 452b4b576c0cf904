# SPDX-License-Identifier: Apache-2.0
"""`rbln-vllm programs`: the table of a configuration, from the same arguments as `serve`."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbln_vllm import envs
from rbln_vllm.cli import programs
from rbln_vllm.cli.main import main
from rbln_vllm.cli.programs import Report
from rbln_vllm.devices import HOST
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.content import cache_key
from rbln_vllm.toolchain import host_toolchain
from tests.unit.host.programs import manifest, scale_program

GEOMETRY = Geometry(
    profile=HOST,
    chunk=128,
    block_size=32,
    max_model_len=256,
    max_num_seqs=4,
    decode_buckets=(1, 4),
)


class TestReport:
    def test_as_text(self) -> None:
        report = Report(GEOMETRY, Path("/cache/rbln/a/b"), frozenset({"decode_b4_q1"}))
        head, _, table = report.text().partition("\n\n")
        facts = dict(line.split(maxsplit=1) for line in head.splitlines())
        assert facts == {
            "profile": "HOST",
            "chunk": "128",
            "block_size": "32",
            "max_model_len": "256",
            "max_num_seqs": "4",
            "blocks_per_sequence": "8",
            "decode_buckets": "1, 4",
            "cache_entry": "/cache/rbln/a/b",
        }
        title, *rows = (line.split() for line in table.splitlines())
        assert title == ["PROGRAM", "ROLE", "BATCH", "QUERY", "TOKENS", "CACHED"]
        assert tuple(row[0] for row in rows) == GEOMETRY.table.names
        assert rows[0] == ["prefill_b1_q128", "prefill", "1", "128", "128", "no"]
        assert rows[2] == ["decode_b4_q1", "decode", "4", "1", "4", "yes"]

    def test_as_json(self) -> None:
        facts = Report(GEOMETRY, Path("/x"), frozenset({"prefill_b1_q128"})).facts()
        assert facts == json.loads(json.dumps(facts))
        assert facts["geometry"]["decode_buckets"] == [1, 4]
        assert facts["cache_entry"] == "/x"
        assert facts["programs"][0] == {
            "name": "prefill_b1_q128",
            "role": "prefill",
            "batch": 1,
            "query": 128,
            "tokens": 128,
            "cached": True,
        }

    def test_without_weights_nothing_is_known_of_the_cache(self) -> None:
        report = Report(GEOMETRY, None, None)
        assert report.facts()["cache_entry"] is None
        assert {program["cached"] for program in report.facts()["programs"]} == {None}
        assert "unknown: the model's weights are not here" in report.text()
        assert report.text().splitlines()[-1].endswith("?")


class TestOutput:
    def test_what_others_print_does_not_reach_stdout(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def parse(_: object) -> Any:
            print("a library's greeting")
            logging.getLogger("vllm").error("a log line")
            return type("Options", (), {"json": True})

        monkeypatch.setattr(programs, "_parse", parse)
        monkeypatch.setattr(programs, "_report", lambda _: Report(GEOMETRY, None, None))
        assert main(["programs", "x", "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["geometry"]["chunk"] == 128
        assert captured.err == "a library's greeting\n"

    def test_logging_is_as_before_afterwards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: object) -> None:
            raise RuntimeError("stop")

        monkeypatch.setattr(programs, "_parse", fail)
        with pytest.raises(RuntimeError):
            main(["programs"])
        assert logging.getLogger("vllm").isEnabledFor(logging.ERROR)
        assert sys.stdout is not sys.stderr


@pytest.fixture
def model(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model and an environment in which nothing of ours is set but an empty cache."""
    for row in envs.REGISTRY:
        monkeypatch.setenv(row.name, "x")  # so that what is written meanwhile is undone
        monkeypatch.delenv(row.name)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return str(tiny_llama_dir)


Facts = Callable[..., dict[str, Any]]


@pytest.fixture
def facts(model: str, capsys: pytest.CaptureFixture[str]) -> Facts:
    def run(*arguments: str) -> dict[str, Any]:
        assert main(["programs", model, "--json", *arguments]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


class TestWithVllm:
    """With vLLM's own parser and configuration; no engine is started."""

    def test_sizes_follow_the_arguments_of_serve(self, facts: Facts) -> None:
        arguments = ("--max-num-seqs", "3", "--max-model-len", "256", "--port", "8001")
        found = facts(*arguments, "--rbln-decode-batch-bucket-strategy", "linear")
        assert found["geometry"]["max_model_len"] == 256
        assert found["geometry"]["max_num_seqs"] == 3
        names = [program["name"] for program in found["programs"]]
        assert f"decode_b{found['geometry']['decode_buckets'][-1]}_q1" in names
        assert f"prefill_b1_q{found['geometry']['chunk']}" in names
        assert not any(program["cached"] for program in found["programs"])

    def test_what_is_cached(
        self, facts: Facts, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = []

        def keep(*arguments: Any) -> Any:
            keys.append(cache_key(*arguments))
            return keys[-1]

        monkeypatch.setattr("rbln_vllm.models.content.cache_key", keep)
        entry = Path(facts()["cache_entry"])
        assert entry.is_relative_to(tmp_path / "rbln")
        assert not entry.exists()
        cache = host_toolchain().cache(tmp_path / "rbln", logging.getLogger(__name__))
        import torch

        captured = [scale_program("decode_b1_q1", {"w": torch.ones(2)})]
        with cache.locked(keys[0]):
            cache.store(keys[0], manifest(), captured)
        assert entry.exists()
        found = facts()
        assert {p["name"] for p in found["programs"] if p["cached"]} == {"decode_b1_q1"}
        assert found["cache_entry"] == str(entry)

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--frobnicate"], "unrecognized arguments: --frobnicate"),
            (["--max-num-seqs", "x"], "argument --max-num-seqs"),
            (["--max-model-len", "100000"], "max_model_len (100000) is greater"),
            (["--model-impl", "optimum"], "model-impl"),
            (["--rbln-decode-batch-bucket-min", "-3"], "bucket"),
        ],
    )
    def test_bad_input_is_one_line(
        self,
        model: str,
        arguments: list[str],
        reason: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert main(["programs", model, *arguments]) == 2
        captured = capsys.readouterr()
        last = captured.err.splitlines()[-1]
        assert last.startswith("rbln-vllm: programs: ")
        assert reason in last
        assert captured.out == ""
        assert "Traceback" not in captured.err

    def test_no_such_model(self, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["programs", f"{model}/nowhere"]) == 2
        assert "nowhere" in capsys.readouterr().err.splitlines()[-1]

    def test_a_device_that_refuses(
        self, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RBLN_FORCE_NPU_NAME", "RBLN-CA12")
        assert main(["programs", model]) == 2
        assert "RBLN-CA12" in capsys.readouterr().err.splitlines()[-1]
