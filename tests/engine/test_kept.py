# SPDX-License-Identifier: Apache-2.0
"""Runs of several checkouts share the kept caches without taking them from each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engine.kept import kept_directory
from tests.models import ROOT

HOLD = """
import sys
from pathlib import Path
from tests.engine.kept import kept_directory
with kept_directory(Path(sys.argv[1]), "theirs") as directory:
    (directory / "program").write_text("theirs")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_kept_until_the_state_changes(tmp_path: Path) -> None:
    for _ in range(2):
        with kept_directory(tmp_path, "old") as old:
            (old / "program").touch()
    with kept_directory(tmp_path, "new") as new:
        assert not old.exists()
        with kept_directory(tmp_path, "new") as again:
            assert again == new
        assert new.exists()


def test_what_another_process_uses_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with kept_directory(tmp_path, "ours"):
            assert (tmp_path / "theirs" / "program").read_text() == "theirs"
        other.communicate()
    with kept_directory(tmp_path, "ours"):
        assert not (tmp_path / "theirs").exists()
