# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all."""

from pathlib import Path

import pytest

from rbln_host.compiler.files import replacing, write_atomically


class TestWritingFiles:
    def test_a_failed_write_leaves_the_old_file_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"old")

        def write_and_fail() -> None:
            with replacing(path) as temporary:
                temporary.write_bytes(b"new")
                raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            write_and_fail()
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
        assert path.read_bytes() == b"old"

    def test_a_write_replaces(self, tmp_path: Path) -> None:
        write_atomically(tmp_path / "file", b"old")
        write_atomically(tmp_path / "file", b"new")
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"new")]
