# SPDX-License-Identifier: Apache-2.0
"""The set-up script's own parts; the whole of it runs before every `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import setup_venv


def test_progress_counts_packages_by_milestones_when_not_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [f"Collecting a{i}==1.0\n" for i in range(49)]
    lines += ["  Using cached a.whl (1 kB)\n", "Processing /srv/wheels/last-1.0.whl\n"]
    output = setup_venv.show_progress(lines, packages=50)
    assert output == lines
    assert capsys.readouterr().out.split() == ["50/50", "last-1.0.whl"]


def test_other_python_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_venv, "PINNED_FOR", (3, 99))
    assert setup_venv.main(["unused"]) == 1
    assert "for Python 3.99" in capsys.readouterr().out


def test_failing_step_stops_with_pip_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(environment: setup_venv.Environment) -> None:
        raise setup_venv.SetupError("No space left on device")

    monkeypatch.setattr(setup_venv, "check_compiler", lambda: None)
    monkeypatch.setattr(setup_venv.Environment, "create", lambda environment: None)
    monkeypatch.setattr(setup_venv.Environment, "install_torch", fail)
    assert setup_venv.main([str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "No space left on device" in shown.err
    assert "[3/8]" in shown.out
    assert "[4/8]" not in shown.out


def test_missing_compiler_is_said_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert setup_venv.main([str(tmp_path / "venv")]) == 1
    assert "no C++ compiler" in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()


def test_compiler_named_by_cxx_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-compiler"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", f"{compiler.name} -m64")
    setup_venv.check_compiler()
