# SPDX-License-Identifier: Apache-2.0
"""Artifacts: what is written reads back, and what was damaged or forged is an ArtifactError."""

import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from rbln_host.compiler import artifact as artifact_module
from rbln_host.compiler.artifact import Artifact, write_artifact
from rbln_host.compiler.files import digest, replacing, write_atomically
from rbln_host.compiler.lowering import lowered
from rbln_host.compiler.manifest import FORMAT, MANIFEST, FileEntry, Manifest
from rbln_host.compiler.weight_files import read_weight_file
from rbln_host.errors import ArtifactError
from rbln_host.runtime.executable import Executable
from tests.unit.host.programs import manifest, scale_program

WEIGHTS = {"a": torch.arange(4.0), "b": torch.tensor([0.5, -1.0, float("inf"), 2.0])}


@pytest.fixture
def written(tmp_path: Path) -> Artifact:
    captured = [scale_program("one", {"a": WEIGHTS["a"]}), scale_program("two", WEIGHTS)]
    return write_artifact(tmp_path / "entry", manifest(), captured)


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / MANIFEST
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def forge(directory: Path, relative: str, content: bytes, group: str, name: str) -> None:
    """Replace a file and give the manifest the digest of the forgery."""
    (directory / relative).write_bytes(content)
    entry = {"path": relative, "size": len(content), "blake3": digest(content)}
    edit_manifest(directory, lambda document: document[group].update({name: entry}))


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


class TestDamage:
    @pytest.mark.parametrize(
        "relative", ["programs/one.json", "weights/00000.safetensors", MANIFEST]
    )
    @pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "altered", "directory"])
    def test_is_found_when_opened(self, written: Artifact, relative: str, damage: str) -> None:
        path = written.directory / relative
        content = path.read_bytes()
        path.unlink()
        if damage == "truncated":
            path.write_bytes(content[:-1])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "altered":
            path.write_bytes(content[:10] + bytes([content[10] ^ 255]) + content[11:])
        elif damage == "directory":
            path.mkdir()
        with pytest.raises(ArtifactError):
            Artifact.open(written.directory)

    def test_after_opening_is_found_when_read(self, written: Artifact) -> None:
        opened = Artifact.open(written.directory)
        program = written.directory / "programs/one.json"
        program.write_bytes(program.read_bytes().replace(b"mul", b"add"))
        with pytest.raises(ArtifactError, match="altered"):
            opened.program("one")
        program.unlink()
        with pytest.raises(ArtifactError, match="cannot be read"):
            opened.program("one")
        (written.directory / "weights/00000.safetensors").unlink()
        with pytest.raises(ArtifactError, match="cannot be read"):
            opened.weights()

    def test_unknown_program(self, written: Artifact) -> None:
        with pytest.raises(KeyError):
            written.program("other")

    def test_a_file_that_cannot_be_read(
        self, written: Artifact, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_: Path) -> NoReturn:
            raise PermissionError("not yours")

        monkeypatch.setattr(artifact_module, "digest_file", refuse)
        with pytest.raises(ArtifactError, match="not yours"):
            Artifact.open(written.directory)

    def test_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match="no readable"):
            Artifact.open(tmp_path / "nowhere")


class TestForgery:
    """Files whose digests are right and whose contents are not."""

    @pytest.mark.parametrize(
        "path",
        ["../x", "/etc/passwd", "programs/../../x", "", ".", "a\x00b", "programs/.x", 5, None],
    )
    def test_paths_lead_nowhere_else(self, written: Artifact, path: object) -> None:
        edit_manifest(written.directory, lambda d: d["programs"]["one"].update({"path": path}))
        with pytest.raises(ArtifactError):
            Artifact.open(written.directory)

    @pytest.mark.parametrize("where", ["file", "directory"])
    def test_symbolic_links_lead_nowhere_else(
        self, written: Artifact, where: str, tmp_path: Path
    ) -> None:
        programs = written.directory / "programs"
        outside = programs.rename(tmp_path / "outside")
        if where == "directory":
            programs.symlink_to(outside)
        else:
            programs.mkdir()
            for file in outside.iterdir():
                (programs / file.name).symlink_to(file)
        with pytest.raises(ArtifactError, match="leads out"):
            Artifact.open(written.directory)

    def test_symbolic_links_in_a_circle(self, written: Artifact) -> None:
        path = written.directory / "programs/one.json"
        path.unlink()
        path.symlink_to(path)
        with pytest.raises(ArtifactError):
            Artifact.open(written.directory)

    def test_the_whole_artifact_may_be_behind_a_link(
        self, written: Artifact, tmp_path: Path
    ) -> None:
        link = tmp_path / "link"
        link.symlink_to(written.directory)
        assert Artifact.open(link).program("one").name == "one"

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: d.update(format=FORMAT + 1),
            lambda d: d.update(format=None),
            lambda d: d.pop("format"),
            lambda d: d.pop("programs"),
            lambda d: d.pop("toolchain"),
            lambda d: d.update(surprise=1),
            lambda d: d.update(programs=[]),
            lambda d: d.update(weights={"0": None}),
            lambda d: d.update(weights={"0": {"path": "x"}}),
            lambda d: d.update(key=["a"]),
            lambda d: d.update(key={"a": 1}),
            lambda d: d.update(model=None),
            lambda d: d.update(label=1),
            lambda d: d.pop("tensors"),
            lambda d: d.update(tensors=[]),
            lambda d: d["tensors"].update(a=None),
            lambda d: d["tensors"]["a"].pop("shape"),
            lambda d: d["tensors"]["a"].update(shape=[-1]),
            lambda d: d["tensors"]["a"].update(shape=[4.0]),
            lambda d: d["tensors"]["a"].update(shape=[True]),
            lambda d: d["tensors"]["a"].update(shape="4"),
            lambda d: d["tensors"]["a"].update(dtype="list"),
            lambda d: d["tensors"]["a"].update(dtype=[]),
            lambda d: d["tensors"]["a"].update(content="../x"),
            lambda d: d["tensors"]["a"].update(layouts=[]),
            lambda d: d["tensors"]["a"].update(layouts=["columns"]),
            lambda d: d["tensors"]["a"].update(surprise=1),
            lambda d: d["programs"]["one"].update(size="3"),
            lambda d: d["programs"]["one"].update(blake3=None),
        ],
    )
    def test_manifests_that_are_none(
        self, written: Artifact, change: Callable[[dict[str, Any]], object]
    ) -> None:
        edit_manifest(written.directory, change)
        with pytest.raises(ArtifactError):
            Artifact.open(written.directory)

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "null", "3", "{", "[" * 100_000, '{"format": 1' + "0" * 5000 + "}", "\ud83d"],
    )
    def test_manifests_that_are_no_document(self, text: str) -> None:
        with pytest.raises(ArtifactError):
            Manifest.from_json(text)

    def test_manifest_that_is_no_text(self, written: Artifact) -> None:
        (written.directory / MANIFEST).write_bytes(b"\xff\xfe\xff")
        with pytest.raises(ArtifactError):
            Artifact.open(written.directory)

    def test_another_program_under_this_name(self, written: Artifact) -> None:
        content = (written.directory / "programs/two.json").read_bytes()
        forge(written.directory, "programs/one.json", content, "programs", "one")
        opened = Artifact.open(written.directory)
        with pytest.raises(ArtifactError, match="'two', not 'one'"):
            opened.program("one")

    @pytest.mark.parametrize(
        "header",
        [
            b"",
            b"{}",
            b'{"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}',
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}',
            b'{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,16]}}',
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}',
            b'{"a":{"dtype":"PICKLE","shape":[4],"data_offsets":[0,16]}}',
            b"not json at all",
        ],
    )
    @pytest.mark.parametrize("claimed", [None, 2**40, 2**63])
    def test_weight_files_whose_header_lies(
        self, written: Artifact, header: bytes, claimed: int | None
    ) -> None:
        length = len(header) if claimed is None else claimed
        content = length.to_bytes(8, "little") + header + bytes(16)
        forge(written.directory, "weights/00000.safetensors", content, "weights", "0")
        with pytest.raises(ArtifactError, match="cannot be read"):
            Artifact.open(written.directory)

    def test_weights_that_no_file_holds(self, written: Artifact) -> None:
        edit_manifest(written.directory, lambda d: d.update(weights={}))
        with pytest.raises(ArtifactError, match="weight 'a'"):
            Artifact.open(written.directory)

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: d["tensors"]["a"].update(shape=[2, 2]),
            lambda d: d["tensors"]["a"].update(dtype="float64"),
            lambda d: d["tensors"]["a"].update(layouts=["rows16"]),
            lambda d: d["tensors"]["a"].update(content="0" * 32),
        ],
    )
    def test_weights_that_are_not_what_the_manifest_says(
        self, written: Artifact, change: Callable[[dict[str, Any]], object]
    ) -> None:
        edit_manifest(written.directory, change)
        with pytest.raises(ArtifactError):
            Artifact.open(written.directory)

    def test_a_program_whose_weights_are_not_there(self, written: Artifact) -> None:
        edit_manifest(written.directory, lambda d: d["tensors"].pop("a"))
        executable = Executable()
        executable.add_artifact(Artifact.open(written.directory))
        with pytest.raises(ArtifactError, match="weight 'a'"):
            executable.load("one")


def test_nothing_is_ever_unpickled(written: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was unpickled")

    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
        (torch.jit, "load"),
        (torch.export, "load"),
    ):
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(AssertionError):
        torch.load("x")
    executable = Executable()
    executable.add_artifact(Artifact.open(written.directory))
    for name in executable.program_names:
        executable.run(name, {"x": torch.ones(4)})


def test_file_entries_are_plain_relative_paths() -> None:
    assert FileEntry("programs/prefill_b1_q128.json", 1, "x").path.startswith("programs")
    with pytest.raises(ArtifactError):
        FileEntry("../x", 1, "x")


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
