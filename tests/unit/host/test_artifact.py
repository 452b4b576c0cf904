# SPDX-License-Identifier: Apache-2.0
"""Artifacts: what is written reads back, and more can be added."""

import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from rbln_host.compiler import artifact as artifact_module
from rbln_host.compiler.artifact import Artifact, write_artifact
from rbln_host.compiler.lowering import lowered
from rbln_host.compiler.manifest import MANIFEST
from rbln_host.compiler.weight_files import read_weight_file
from rbln_host.errors import ArtifactError
from rbln_host.runtime.executable import Executable
from tests.unit.host.artifacts import WEIGHTS, written
from tests.unit.host.programs import manifest, scale_program

__all__ = ["written"]  # a fixture


class TestRoundTrip:
    def test_programs_and_weights(self, written: Artifact) -> None:
        opened = Artifact.open(written.directory)
        assert opened.manifest == written.manifest
        assert opened.program_names == ("one", "two")
        assert opened.program("two") == lowered([scale_program("two", WEIGHTS)])[0].graph
        weights = opened.weights()
        assert weights.keys() == WEIGHTS.keys()
        assert all(torch.equal(weights[name].plain(), WEIGHTS[name]) for name in WEIGHTS)

    def test_runs(self, written: Artifact) -> None:
        executable = Executable()
        executable.add_artifact(Artifact.open(written.directory))
        (output,) = executable.run("two", {"x": torch.ones(4)})
        assert torch.equal(output, WEIGHTS["a"] * WEIGHTS["b"])

    def test_size_and_time(self, written: Artifact) -> None:
        files = [p for p in written.directory.rglob("*") if p.is_file() and p.name != MANIFEST]
        assert written.nbytes == sum(path.stat().st_size for path in files)
        assert written.written_at == (written.directory / MANIFEST).stat().st_mtime

    def test_moves_with_its_directory(self, written: Artifact, tmp_path: Path) -> None:
        moved = written.directory.rename(tmp_path / "elsewhere")
        assert Artifact.open(moved).program_names == ("one", "two")

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.bool,
            torch.float8_e4m3fn,
            torch.complex64,
        ],
    )
    def test_keeps_every_bit_of(self, dtype: torch.dtype, tmp_path: Path) -> None:
        tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
        write_artifact(tmp_path, manifest(), [scale_program("p", {"w": tensor})])
        loaded = Artifact.open(tmp_path).weights()["w"].plain()
        assert loaded.dtype == dtype
        assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))

    def test_other_users_may_read_it(self, written: Artifact) -> None:
        """Files and directories get the modes that the process gives to new ones."""
        umask = os.umask(0)
        os.umask(umask)
        for path in (written.directory, *written.directory.rglob("*")):
            full = 0o777 if path.is_dir() else 0o666
            assert stat.S_IMODE(path.stat().st_mode) == full & ~umask


class TestWeights:
    def test_are_stored_once(self, written: Artifact) -> None:
        (shard,) = (written.directory / "weights").iterdir()
        assert len(read_weight_file(shard)) == 2

    def test_tied_under_two_names_are_stored_once(self, tmp_path: Path) -> None:
        tied = torch.randn(4)
        captured = [scale_program("p", {"head": tied}), scale_program("q", {"embed": tied})]
        artifact = write_artifact(tmp_path, manifest(), captured)
        assert list(artifact.weights()) == ["embed"]
        assert list(artifact.program("p").weights.values()) == ["embed"]
        assert captured[0].graph.weights == {"p_0": "head"}, "the caller's program is unchanged"

    def test_overlapping_views_are_stored_each(self, tmp_path: Path) -> None:
        fused = torch.arange(8.0)
        parts = {"first": fused[:4], "middle": fused[2:6], "stepped": fused[::2]}
        write_artifact(tmp_path, manifest(), [scale_program("p", parts)])
        loaded = Artifact.open(tmp_path).weights()
        assert all(torch.equal(loaded[name].plain(), parts[name]) for name in parts)

    def test_are_split_into_shards(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(artifact_module, "SHARD_BYTES", 40)
        weights = {f"w{index}": torch.full((4,), float(index)) for index in range(5)}
        artifact = write_artifact(tmp_path, manifest(), [scale_program("p", weights)])
        assert len(artifact.manifest.weights) == 3
        loaded = Artifact.open(tmp_path).weights()
        assert all(torch.equal(loaded[name].plain(), weights[name]) for name in weights)

    def test_one_name_for_two_weights_is_refused(self, tmp_path: Path) -> None:
        captured = [
            scale_program("p", {"w": torch.ones(4)}),
            scale_program("q", {"w": torch.zeros(4)}),
        ]
        with pytest.raises(ValueError, match="two different weights are called 'w'"):
            write_artifact(tmp_path, manifest(), captured)
        assert not (tmp_path / MANIFEST).exists()

    def test_equal_copies_under_one_name_are_one_weight(self, tmp_path: Path) -> None:
        nan = torch.tensor([float("nan"), 1.0, 2.0, 3.0])
        captured = [scale_program("p", {"w": nan}), scale_program("q", {"w": nan.clone()})]
        assert list(write_artifact(tmp_path, manifest(), captured).weights()) == ["w"]

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's memory map")
    def test_are_mapped_not_copied(self, written: Artifact) -> None:
        (shard,) = (written.directory / "weights").iterdir()
        weights = written.weights()
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(shard))]
        for tensor in weights.values():
            pointer = tensor.plain().data_ptr()
            inside = [int(a, 16) <= pointer < int(b, 16) for a, b in ranges]
            assert any(inside)

    def test_writing_to_one_does_not_reach_the_file(self, written: Artifact) -> None:
        written.weights()["a"].plain().add_(1)
        assert torch.equal(Artifact.open(written.directory).weights()["a"].plain(), WEIGHTS["a"])


class TestAdding:
    def test_keeps_what_is_there_and_writes_only_what_is_new(self, written: Artifact) -> None:
        old = {p: p.stat().st_ino for p in (written.directory / "weights").iterdir()}
        extra = scale_program("three", {"a": WEIGHTS["a"], "c": torch.ones(4)})
        bigger = write_artifact(written.directory, written.manifest, [extra])
        opened = Artifact.open(written.directory)
        assert opened.manifest == bigger.manifest
        assert opened.program_names == ("one", "three", "two")
        new = {p for p in (written.directory / "weights").iterdir() if p not in old}
        assert all(path.stat().st_ino == inode for path, inode in old.items())
        (shard,) = new
        (stored,) = read_weight_file(shard).values()
        assert torch.equal(stored, torch.ones(4))

    def test_refuses_a_stored_name_of_another_shape(self, written: Artifact) -> None:
        with pytest.raises(ValueError, match="'a'"):
            write_artifact(
                written.directory, written.manifest, [scale_program("x", {"a": torch.ones(5)})]
            )
        assert Artifact.open(written.directory).program_names == ("one", "two")

    def test_files_that_are_open_elsewhere_are_never_overwritten(self, written: Artifact) -> None:
        """A half-written addition may have left a file that another process has mapped."""
        left = written.directory / "weights" / "00001.safetensors"
        left.write_bytes(b"left behind")
        with left.open("rb") as reader:
            write_artifact(
                written.directory, written.manifest, [scale_program("x", {"c": torch.ones(4)})]
            )
            assert reader.read() == b"left behind"
        assert torch.equal(Artifact.open(written.directory).weights()["c"].plain(), torch.ones(4))

    def test_a_failure_leaves_the_old_artifact(
        self, written: Artifact, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> NoReturn:
            raise OSError("disk full")

        monkeypatch.setattr(artifact_module, "write_weight_file", fail)
        with pytest.raises(OSError, match="disk full"):
            write_artifact(
                written.directory, written.manifest, [scale_program("x", {"c": torch.ones(4)})]
            )
        assert Artifact.open(written.directory).program_names == ("one", "two")

    @pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", ".hidden", "a\nb"])
    def test_a_program_name_that_is_no_file_name_is_refused(
        self, written: Artifact, name: str, tmp_path: Path
    ) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ArtifactError, match="plain relative path"):
            write_artifact(
                written.directory, written.manifest, [scale_program(name, {"a": WEIGHTS["a"]})]
            )
        assert sorted(tmp_path.rglob("*")) == before
