# SPDX-License-Identifier: Apache-2.0
"""`rbln-vllm cache`: list, remove and path over a real cache."""

import json
import logging
import threading
from pathlib import Path

import pytest
import torch

from rbln_vllm.cli.main import main
from rbln_vllm.cli.text_table import byte_size, text_table
from rbln_vllm.toolchain import Artifact, CacheKey, ProgramCache, host_toolchain
from tests.unit.host.programs import manifest, scale_program


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgramCache:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return host_toolchain().cache(tmp_path / "rbln", logging.getLogger(__name__))


def store(cache: ProgramCache, label: str, programs: int = 1, **parts: str) -> Artifact:
    key = CacheKey(label, {"model_content": "0123456789abcdef", **parts})
    captured = [scale_program(f"p{i}", {"w": torch.ones(300)}) for i in range(programs)]
    with cache.locked(key):
        return cache.store(key, manifest(), captured)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["cache", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["cache", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rbln-vllm: cache")
    assert captured.err.count("\n") == 1
    return captured.err


class TestList:
    def test_empty(self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
        assert output(capsys, "list") == f"The compile cache at {cache.root} is empty.\n"
        assert not cache.root.exists()

    def test_entries(self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
        entries = [store(cache, "SmolLM2", 3), store(cache, "", dtype="bfloat16")]
        title, *lines = output(capsys, "list").splitlines()
        assert title.split() == ["MODEL", "PROFILE", "PROGRAMS", "SIZE", "WRITTEN", "SIGNATURE"]
        by_signature = {line.split()[-1]: line.split() for line in lines}
        assert set(by_signature) == {entry.directory.name for entry in entries}
        first, second = (by_signature[entry.directory.name] for entry in entries)
        assert first[:3] == ["SmolLM2", "HOST", "3"]
        assert " ".join(first[3:5]) == byte_size(entries[0].nbytes)
        assert second[:3] == ["?", "HOST", "1"]

    def test_as_json(self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
        entry = store(cache, "SmolLM2", 2, dtype="bfloat16")
        (facts,) = json.loads(output(capsys, "list", "--json"))
        assert facts["model"] == "SmolLM2"
        assert facts["programs"] == ["p0", "p1"]
        assert facts["bytes"] == entry.nbytes
        assert facts["path"] == str(entry.directory)
        assert facts["signature"] == entry.directory.name
        assert facts["key"] == {"model_content": "0123456789abcdef", "dtype": "bfloat16"}

    def test_an_empty_cache_as_json(
        self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert json.loads(output(capsys, "list", "--json")) == []


class TestRemove:
    def test_by_the_beginning_of_a_signature(
        self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]
    ) -> None:
        gone, kept = store(cache, "a"), store(cache, "b", dtype="bfloat16")
        signature = gone.directory.name
        assert output(capsys, "remove", signature[:6]) == f"removed {signature} (a)\n"
        assert [e.directory for e in cache.entries()] == [kept.directory]

    def test_several_at_once(self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
        names = [store(cache, "a", number=str(number)).directory.name for number in range(3)]
        assert output(capsys, "remove", names[0], names[2], names[0]).count("removed") == 2
        assert [e.directory.name for e in cache.entries()] == [names[1]]

    def test_all(self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
        store(cache, "a")
        store(cache, "b", dtype="bfloat16")
        assert output(capsys, "remove", "--all").count("removed") == 2
        assert cache.entries() == []
        assert "is empty" in output(capsys, "remove", "--all")

    @pytest.mark.parametrize("signature", ["zzz", "", "../..", "*"])
    def test_what_no_signature_begins_with(
        self, cache: ProgramCache, capsys: pytest.CaptureFixture[str], signature: str
    ) -> None:
        store(cache, "a")
        assert f"begins with {signature!r}" in refusal(capsys, "remove", signature)
        assert len(cache.entries()) == 1

    def test_what_several_begin_with(
        self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names = [store(cache, "a", number=str(number)).directory.name for number in range(40)]
        first = max("0123456789abcdef", key=lambda c: sum(n.startswith(c) for n in names))
        error = refusal(capsys, "remove", first)
        assert all((name in error) is name.startswith(first) for name in names)
        assert len(cache.entries()) == 40

    def test_nothing_is_removed_when_one_is_wrong(
        self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name = store(cache, "a").directory.name
        refusal(capsys, "remove", name, "zzz")
        assert len(cache.entries()) == 1

    @pytest.mark.parametrize("arguments", [[], ["--all", "abc"]])
    def test_signatures_or_all(
        self, cache: ProgramCache, capsys: pytest.CaptureFixture[str], arguments: list[str]
    ) -> None:
        store(cache, "a")
        assert "give signatures" in refusal(capsys, "remove", *arguments)
        assert len(cache.entries()) == 1

    def test_an_entry_in_use(self, cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
        entry = store(cache, "a")
        key = CacheKey("a", entry.manifest.key)

        codes: list[int] = []
        with cache.locked(key):
            thread = threading.Thread(
                target=lambda: codes.append(main(["cache", "remove", "--all"]))
            )
            thread.start()
            thread.join()
        assert codes == [1]
        captured = capsys.readouterr()
        assert captured.err == f"rbln-vllm: cache remove: {entry.directory} is being compiled\n"
        assert len(cache.entries()) == 1


def test_path(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "path") == f"{cache.root}\n"


@pytest.mark.parametrize(
    "arguments", [(), ("frobnicate",), ("list", "--frob"), ("path", "x"), ("remove", "--force")]
)
def test_wrong_arguments(
    cache: ProgramCache, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    refusal(capsys, *arguments)


class TestTextTable:
    def test_columns(self) -> None:
        table = text_table(
            ("NAME", "COUNT", "SIZE"), [("a", "3", "1.5 KiB"), ("long name", "12", "8 B")]
        )
        assert table.splitlines() == [
            "NAME       COUNT     SIZE",
            "a              3  1.5 KiB",
            "long name     12      8 B",
        ]

    def test_no_rows(self) -> None:
        assert text_table(("A", "B"), []) == "A  B"

    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (270 << 20, "270.0 MiB"),
            (5 << 40, "5120.0 GiB"),
        ],
    )
    def test_byte_size(self, size: int, text: str) -> None:
        assert byte_size(size) == text
