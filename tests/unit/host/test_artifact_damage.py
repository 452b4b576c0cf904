# SPDX-License-Identifier: Apache-2.0
"""Artifacts that were damaged or forged: an ArtifactError, and nothing outside is touched."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from rbln_host.compiler import artifact as artifact_module
from rbln_host.compiler.artifact import Artifact
from rbln_host.compiler.manifest import FORMAT, MANIFEST, FileEntry, Manifest
from rbln_host.errors import ArtifactError
from rbln_host.runtime.executable import Executable
from tests.unit.host.artifacts import edit_manifest, forge, written

__all__ = ["written"]  # a fixture


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
