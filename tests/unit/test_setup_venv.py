# SPDX-License-Identifier: Apache-2.0
"""The set-up script's own parts; the whole of it runs before every `make test`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
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
    assert "[3/9]" in shown.out
    assert "[4/9]" not in shown.out


class FakePip(setup_venv.Environment):
    """Its pip is a script of the test's own."""

    def __init__(self, directory: Path, script: str) -> None:
        super().__init__(directory)
        self._script = script

    def pip_install(self, arguments: list[str], packages: int) -> None:
        assert len(arguments) == packages

    def pip_command(self, arguments: list[str]) -> list[str]:
        return [sys.executable, "-c", self._script]


def test_a_failing_build_is_shown(tmp_path: Path) -> None:
    environment = FakePip(tmp_path, "import sys; sys.exit('fatal error: no such file')")
    environment.start_project()
    with pytest.raises(setup_venv.SetupError, match="fatal error: no such file"):
        environment.finish_project()


def test_a_build_ends_with_the_step_that_fails_beside_it(tmp_path: Path) -> None:
    """With the compilers, which are children of pip."""
    pid_file = tmp_path / "pid"
    compiler = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 600"
    environment = FakePip(tmp_path, f"import os; os.system({compiler!r})")
    environment.start_project()
    while not pid_file.exists():
        time.sleep(0.01)
    environment.stop()
    end = time.monotonic() + 60
    while not has_ended(int(pid_file.read_text())):
        assert time.monotonic() < end, "the compiler goes on"
        time.sleep(0.01)
    environment.stop()


def has_ended(pid: int) -> bool:
    """Also a process whose end nobody has taken note of."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


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
