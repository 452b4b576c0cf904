# SPDX-License-Identifier: Apache-2.0
"""`rbln-vllm programs`: the table of a configuration, from the same arguments as `serve`."""

import io
import json
import logging
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rbln_vllm import envs
from rbln_vllm.cli import programs
from rbln_vllm.cli.main import main
from rbln_vllm.cli.programs import Report
from rbln_vllm.devices import HOST
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.content import cache_key
from rbln_vllm.toolchain import CacheKey, host_toolchain
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


SERVE = ["--max-num-seqs", "3", "--max-model-len", "256", "--port", "8001"]
LINEAR = ["--model-impl", "vllm", "--rbln-decode-batch-bucket-strategy", "linear"]
REFUSED = [
    (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    (["--max-num-seqs", "x"], "argument --max-num-seqs"),
    (["--max-model-len", "100000"], "max_model_len (100000) is greater"),
    (["--model-impl", "terratorch"], "model-impl"),
    (["--rbln-decode-batch-bucket-min", "-3"], "bucket"),
]


def run_commands() -> None:
    """Run `programs` for the model given and print what came of it; for a process of its own.

    vLLM decides on its platform once in a process, and other tests decide against ours.
    """
    model = sys.argv[1]
    results = {
        "sizes": run_one(model, "--json", *SERVE, *LINEAR),
        "nowhere": run_one(f"{model}/nowhere"),
        "text": run_one(model),
    }
    results |= {reason: run_one(model, *arguments) for arguments, reason in REFUSED}
    results["before"] = run_one(model, "--json")
    store_one_program(Path(json.loads(results["before"].out)["cache_entry"]))
    results["after"] = run_one(model, "--json")
    results["explained"] = run_one(model, "--json", "--explain")
    results["explained text"] = run_one(model, "--explain")
    os.environ["RBLN_FORCE_NPU_NAME"] = "RBLN-CA12"
    results["RBLN-CA12"] = run_one(model, "--model-impl", "vllm")
    print(json.dumps({name: vars(result) for name, result in results.items()}))


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


KEYS: list[CacheKey] = []


def run_one(*arguments: str) -> Result:
    def keep(*of: Any) -> CacheKey:
        KEYS.append(cache_key(*of))
        return KEYS[-1]

    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch("rbln_vllm.models.content.cache_key", keep),
    ):
        code = main(["programs", *arguments])
    return Result(code, out.getvalue(), err.getvalue())


def store_one_program(entry: Path) -> None:
    import torch

    cache = host_toolchain().cache(envs.cache_root() / "rbln", logging.getLogger(__name__))
    with cache.locked(KEYS[-1]):
        captured = [scale_program("decode_b1_q1", {"w": torch.ones(2)})]
        stored = cache.store(KEYS[-1], manifest(), captured)
    assert stored.directory == entry


@pytest.fixture(scope="module")
def results(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    ours = {row.name for row in envs.REGISTRY} | {"VLLM_PLUGINS", "VLLM_TARGET_DEVICE"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("cache"))
    code = "from tests.unit.cli.test_programs import run_commands; run_commands()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_llama_dir)],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Result(**result) for name, result in found.items()}


class TestWithVllm:
    """With vLLM's own parser and configuration; no engine is started."""

    def test_sizes_follow_the_arguments_of_serve(self, results: dict[str, Result]) -> None:
        assert results["sizes"].code == 0
        found = json.loads(results["sizes"].out)
        assert found["geometry"]["max_model_len"] == 256
        assert found["geometry"]["max_num_seqs"] == 3
        names = [program["name"] for program in found["programs"]]
        assert f"decode_b{found['geometry']['decode_buckets'][-1]}_q1" in names
        assert f"prefill_b1_q{found['geometry']['chunk']}" in names
        assert not any(program["cached"] for program in found["programs"])

    def test_text(self, results: dict[str, Result]) -> None:
        assert results["text"].code == 0
        assert results["text"].out.startswith("profile ")
        assert "prefill_b1_q" in results["text"].out

    def test_what_is_cached(self, results: dict[str, Result]) -> None:
        before, after = (json.loads(results[name].out) for name in ("before", "after"))
        assert before["cache_entry"] == after["cache_entry"]
        assert not any(program["cached"] for program in before["programs"])
        assert [p["name"] for p in after["programs"] if p["cached"]] == ["decode_b1_q1"]

    def test_explained(self, results: dict[str, Result]) -> None:
        assert results["explained"].code == 0, results["explained"].err
        explained = json.loads(results["explained"].out)["explained"]
        assert {name for name, report in explained.items() if report} == {"decode_b1_q1"}
        assert explained["decode_b1_q1"]["commands"] == 1
        assert "explained" not in json.loads(results["after"].out)
        text = results["explained text"].out
        assert "Not compiled yet, so nothing is known of: prefill_b1_q" in text

    @pytest.mark.parametrize("reason", [*(reason for _, reason in REFUSED), "nowhere", "RBLN-CA12"])
    def test_bad_input_is_one_line(self, results: dict[str, Result], reason: str) -> None:
        result = results[reason]
        assert result.code == 2
        last = result.err.splitlines()[-1]
        assert last.startswith("rbln-vllm: programs: ")
        assert reason in last
        assert result.out == ""
        assert "Traceback" not in result.err
