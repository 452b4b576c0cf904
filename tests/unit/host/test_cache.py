# SPDX-License-Identifier: Apache-2.0
"""The compile cache: found by content wherever it lies, shared by processes, never half there."""

import logging
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from rbln_host.compiler import cache as cache_module
from rbln_host.compiler.artifact import Artifact, write_artifact
from rbln_host.compiler.cache import ArtifactCache, CacheKey
from rbln_host.compiler.capture import Captured
from rbln_host.compiler.lowering import lowered
from rbln_host.compiler.manifest import MANIFEST, Manifest
from rbln_host.errors import ArtifactError, CacheBusyError
from tests.unit.host.programs import manifest, scale_program

logger = logging.getLogger("rbln_host.tests")
VALUES = {"w": 2.0, "v": 3.0, "u": 4.0}
PARTS = {"model_content": "0123456789abcdef", "dtype": "float32", "block_size": "128"}


def key(label: str = "tiny", **changes: str) -> CacheKey:
    return CacheKey(label, {**PARTS, **changes})


def check_rebuilding(cache: ArtifactCache) -> None:
    """An entry takes the place of what is there, with nothing of it."""
    store(cache, key(), "two")
    found = cache.find(key())
    assert found is not None
    assert found.program_names == ("two",)


def program(name: str, weight: str = "w") -> Captured:
    return scale_program(name, {weight: torch.full((4,), VALUES[weight])})


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache", logger)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger.name)
    return caplog


def store(cache: ArtifactCache, to: CacheKey, *names: str) -> Artifact:
    with cache.locked(to):
        return cache.store(to, manifest(), [program(name) for name in names])


class TestKey:
    def test_signature_is_of_the_parts_alone(self) -> None:
        swapped = CacheKey("other label", dict(reversed(PARTS.items())))
        assert swapped.signature == key().signature
        assert swapped.directory == key().directory

    @pytest.mark.parametrize("name", list(PARTS))
    def test_every_part_counts(self, name: str) -> None:
        assert key(**{name: "fedcba9876543210"}).directory != key().directory

    def test_values_do_not_run_into_each_other(self) -> None:
        assert key(a="x", b="").signature != key(a="", b="x").signature
        assert key(a='x","b":"y').signature != key(a="x", b="y").signature

    @pytest.mark.parametrize("content", ["", "abc", "../../../../x", "0123456789abcde/"])
    def test_the_content_is_a_digest(self, content: str) -> None:
        with pytest.raises(ValueError, match="model_content"):
            key(model_content=content)

    def test_parts_are_strings(self) -> None:
        with pytest.raises(ValueError, match="'block_size'"):
            CacheKey("x", {**PARTS, "block_size": 128})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="model_content"):
            CacheKey("x", {})

    def test_differences(self) -> None:
        other = {"model_content": PARTS["model_content"], "dtype": "bfloat16", "old": "1"}
        assert key().differences(other) == {
            "block_size": (None, "128"),
            "dtype": ("bfloat16", "float32"),
            "old": ("1", None),
        }
        assert key().differences(PARTS) == {}


class TestFind:
    def test_an_empty_cache(self, cache: ArtifactCache, log: pytest.LogCaptureFixture) -> None:
        assert cache.find(key()) is None
        assert "is empty" in log.text

    def test_what_was_stored(self, cache: ArtifactCache) -> None:
        stored = store(cache, key(), "one")
        found = cache.find(key())
        assert found is not None
        assert found.directory == stored.directory == cache.path(key())
        assert found.manifest == stored.manifest
        assert found.manifest.key == PARTS
        assert found.manifest.label == "tiny"

    def test_under_another_root_and_label(self, cache: ArtifactCache, tmp_path: Path) -> None:
        """The same model and options hit on another host, path or name of the model."""
        store(cache, key("models--a"), "one")
        moved = cache.root.rename(tmp_path / "mounted elsewhere")
        found = ArtifactCache(moved, logger).find(key("/data/b"))
        assert found is not None
        assert [found.program("one")] == [item.graph for item in lowered([program("one")])]
        assert torch.equal(found.weights()["w"].plain(), torch.full((4,), 2.0))

    def test_holds_no_path(self, cache: ArtifactCache, tmp_path: Path) -> None:
        directory = store(cache, key("/models/secret"), "one").directory
        text = (directory / MANIFEST).read_text()
        assert str(tmp_path) not in text
        assert "secret" not in str(directory)

    @pytest.mark.parametrize(
        "relative", [MANIFEST, "programs/one.json", "weights/00000.safetensors"]
    )
    def test_a_damaged_entry_is_reported_and_rebuilt(
        self, cache: ArtifactCache, relative: str, log: pytest.LogCaptureFixture
    ) -> None:
        path = store(cache, key(), "one").directory / relative
        path.write_bytes(path.read_bytes()[:-1])
        assert cache.find(key()) is None
        assert "the entry is rebuilt" in log.text
        check_rebuilding(cache)

    def test_an_entry_of_another_key_is_reported_and_rebuilt(
        self, cache: ArtifactCache, log: pytest.LogCaptureFixture
    ) -> None:
        other = store(cache, key(dtype="bfloat16"), "one").directory
        shutil.copytree(other, cache.path(key()))
        assert cache.find(key()) is None
        assert "belongs to another key: dtype differ" in log.text
        check_rebuilding(cache)

    def test_a_file_in_the_place_of_an_entry(self, cache: ArtifactCache) -> None:
        cache.path(key()).parent.mkdir(parents=True)
        cache.path(key()).write_text("not a directory")
        assert cache.find(key()) is None
        store(cache, key(), "one")
        assert cache.find(key()) is not None

    def test_a_directory_that_cannot_be_read(
        self,
        cache: ArtifactCache,
        log: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        store(cache, key(), "one")
        original = Path.stat

        def refuse(path: Path, **options: bool) -> object:
            if path.is_relative_to(cache.path(key())):
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, **options)

        monkeypatch.setattr(Path, "stat", refuse)
        assert cache.find(key()) is None
        assert "Permission denied" in log.text

    def test_a_root_that_is_a_file(self, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").touch()
        assert ArtifactCache(tmp_path / "file", logger).find(key()) is None
        assert "Not a directory" in log.text


class TestExplanation:
    def explained(self, cache: ArtifactCache, log: pytest.LogCaptureFixture) -> str:
        log.clear()
        assert cache.find(key()) is None
        return log.text.partition("which differs in ")[2].strip()

    def test_names_the_part_that_differs(
        self, cache: ArtifactCache, log: pytest.LogCaptureFixture
    ) -> None:
        store(cache, key(block_size="256"), "one")
        assert self.explained(cache, log) == "block_size: cached '256', wanted '128'"

    def test_is_of_the_nearest_entry(
        self, cache: ArtifactCache, log: pytest.LogCaptureFixture
    ) -> None:
        store(cache, key(block_size="256", dtype="bfloat16"), "one")
        store(cache, key(torch="2.12"), "one")
        assert self.explained(cache, log) == "torch: cached '2.12', wanted None"

    def test_prefers_the_same_model(
        self, cache: ArtifactCache, log: pytest.LogCaptureFixture
    ) -> None:
        for number in range(4):
            store(cache, key(model_content=f"{number}" * 16), "one")
        store(cache, key(dtype="bfloat16"), "one")
        assert self.explained(cache, log) == "dtype: cached 'bfloat16', wanted 'float32'"

    def test_passes_over_what_is_no_entry(
        self, cache: ArtifactCache, log: pytest.LogCaptureFixture
    ) -> None:
        broken = store(cache, key(dtype="bfloat16"), "one").directory
        (broken / MANIFEST).write_text("{")
        store(cache, key(block_size="256", dtype="x"), "one")
        assert self.explained(cache, log).startswith("block_size")


class TestStore:
    def test_an_interrupted_store_leaves_nothing(
        self, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(directory: Path, *_: object) -> NoReturn:
            (directory / "weights").mkdir(parents=True)
            raise KeyboardInterrupt

        monkeypatch.setattr(cache_module, "write_artifact", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store(cache, key(), "one")
        assert [p.name for p in cache.path(key()).parent.iterdir()] == [f"{key().signature}.lock"]
        monkeypatch.undo()
        store(cache, key(), "one")
        assert cache.find(key()) is not None

    def test_what_a_killed_process_left_is_removed(self, cache: ArtifactCache) -> None:
        path = cache.path(key())
        left = path.parent / f".{path.name}.0123"
        (left / "weights").mkdir(parents=True)
        others = path.parent / ".another.0123"
        others.mkdir()
        store(cache, key(), "one")
        assert not left.exists()
        assert others.exists()

    def test_an_entry_is_not_visible_before_it_is_whole(
        self, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        def watch(directory: Path, manifest: Manifest, captured: Iterable[Captured]) -> Artifact:
            artifact = write_artifact(directory, manifest, captured)
            seen.append((cache.find(key()), cache.entries()))
            return artifact

        monkeypatch.setattr(cache_module, "write_artifact", watch)
        store(cache, key(), "one")
        assert seen == [(None, [])]

    def test_a_sound_entry_is_added_to(self, cache: ArtifactCache) -> None:
        store(cache, key(), "one")
        stored = store(cache, key(), "two")
        assert stored.program_names == ("one", "two")

    def test_a_cache_that_cannot_be_written_to_says_so(
        self,
        cache: ArtifactCache,
        log: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A shared, read-only cache serves what it has, and refuses to store with an OSError."""
        store(cache, key(), "one")

        def refuse(*_: object, **__: object) -> NoReturn:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(Path, "mkdir", refuse)
        with cache.locked(key()):
            assert cache.find(key()) is not None
        assert "Read-only file system" in log.text
        with cache.locked(key(dtype="x")), pytest.raises(OSError, match="Read-only"):
            cache.store(key(dtype="x"), manifest(), [program("one")])

    def test_other_users_may_read_the_entry(self, cache: ArtifactCache) -> None:
        directory = store(cache, key(), "one").directory
        assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE(cache.root.stat().st_mode)


class TestExtend:
    def test_adds_programs_and_only_new_weights(self, cache: ArtifactCache) -> None:
        artifact = store(cache, key(), "one")
        old = {p: p.stat().st_ino for p in (artifact.directory / "weights").iterdir()}
        with cache.locked(key()):
            extended = cache.extend(artifact, [program("two"), program("three", "v")])
        found = cache.find(key())
        assert found is not None
        assert found.manifest == extended.manifest
        assert found.program_names == ("one", "three", "two")
        assert all(path.stat().st_ino == inode for path, inode in old.items())
        assert len(found.manifest.weights) == 2
        assert sorted(found.weights()) == ["v", "w"]

    def test_keeps_what_another_process_added(self, cache: ArtifactCache) -> None:
        ours = store(cache, key(), "one")
        theirs = cache.find(key())
        assert theirs is not None
        with cache.locked(key()):
            cache.extend(theirs, [program("theirs", "v")])
        mapped = theirs.weights()
        with cache.locked(key()):
            cache.extend(ours, [program("ours", "u")])
        found = cache.find(key())
        assert found is not None
        assert found.program_names == ("one", "ours", "theirs")
        assert sorted(found.weights()) == ["u", "v", "w"]
        assert torch.equal(mapped["w"].plain(), torch.full((4,), 2.0))

    def test_of_a_removed_entry(self, cache: ArtifactCache) -> None:
        artifact = store(cache, key(), "one")
        cache.remove(artifact)
        with pytest.raises(ArtifactError):
            cache.extend(artifact, [program("two")])


class TestRemove:
    def test_removes_one_entry(self, cache: ArtifactCache) -> None:
        store(cache, key(), "one")
        other = store(cache, key(dtype="bfloat16"), "one")
        cache.remove(other)
        assert [a.manifest.key["dtype"] for a in cache.entries()] == ["float32"]
        assert not other.directory.exists()

    def test_loaded_weights_stay_usable(self, cache: ArtifactCache) -> None:
        artifact = store(cache, key(), "one")
        weights = artifact.weights()
        cache.remove(artifact)
        assert torch.equal(weights["w"].plain(), torch.full((4,), 2.0))

    def test_refuses_while_it_is_being_compiled(self, cache: ArtifactCache) -> None:
        artifact = store(cache, key(), "one")
        held, done = threading.Event(), threading.Event()

        def compile_slowly() -> None:
            with cache.locked(key()):
                held.set()
                done.wait(60)

        thread = threading.Thread(target=compile_slowly)
        thread.start()
        assert held.wait(60)
        try:
            with pytest.raises(CacheBusyError, match="is being compiled"):
                cache.remove(artifact)
        finally:
            done.set()
            thread.join()
        assert cache.find(key()) is not None
        cache.remove(artifact)

    def test_twice(self, cache: ArtifactCache) -> None:
        artifact = store(cache, key(), "one")
        cache.remove(artifact)
        cache.remove(artifact)


class TestEntries:
    def test_of_no_root(self, cache: ArtifactCache) -> None:
        assert cache.entries() == []

    def test_hidden_and_broken_directories_are_none(self, cache: ArtifactCache) -> None:
        good = store(cache, key(), "one").directory
        shutil.copytree(good, good.with_name(f".{good.name}.0123"))
        broken = store(cache, key(dtype="bfloat16"), "one").directory
        (broken / MANIFEST).write_bytes(b"\xff")
        assert [a.directory for a in cache.entries()] == [good]


OTHER_PROCESS = f"""
import logging, sys
from pathlib import Path
from rbln_host.compiler.cache import ArtifactCache, CacheKey

logging.basicConfig(stream=sys.stdout, level=logging.INFO)
cache, key = ArtifactCache(Path(sys.argv[1]), logging.getLogger()), CacheKey("other", {PARTS!r})
with cache.locked(key):
    print(cache.find(key).program_names)
"""


def compile_once(
    root: Path, compiled: Iterable[str], meanwhile: Callable[[], object] = lambda: None
) -> bool:
    """What a starting engine does; whether it compiled."""
    cache = ArtifactCache(root, logger)
    with cache.locked(key()):
        if cache.find(key()) is not None:
            return False
        meanwhile()
        cache.store(key(), manifest(), [program(name) for name in compiled])
        return True


class TestAtOnce:
    def test_threads(self, cache: ArtifactCache, log: pytest.LogCaptureFixture) -> None:
        results: list[bool] = []

        def another_waits() -> None:
            end = time.monotonic() + 60
            while "waiting for it" not in log.text:
                assert time.monotonic() < end, "nobody waits"
                time.sleep(0.001)

        def start() -> None:
            results.append(compile_once(cache.root, ["one"], another_waits))

        threads = [threading.Thread(target=start) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [False, False, True]
        assert cache.find(key()) is not None

    def test_processes(self, cache: ArtifactCache) -> None:
        with cache.locked(key()):
            command = [sys.executable, "-c", OTHER_PROCESS, str(cache.root)]
            other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert other.stdout is not None
            assert "waiting for it" in other.stdout.readline()
            cache.store(key(), manifest(), [program("one")])
        output, _ = other.communicate(timeout=60)
        assert other.returncode == 0
        assert output.splitlines()[-1] == "('one',)"

    def test_a_lock_file_of_a_dead_process_holds_nobody(self, cache: ArtifactCache) -> None:
        path = cache.path(key())
        path.parent.mkdir(parents=True)
        path.with_name(f"{path.name}.lock").write_text("12345")
        assert compile_once(cache.root, ["one"])

    def test_the_lock_is_released_after_an_error(self, cache: ArtifactCache) -> None:
        def fail() -> None:
            with cache.locked(key()):
                raise RuntimeError("compiler")

        with pytest.raises(RuntimeError, match="compiler"):
            fail()
        assert compile_once(cache.root, ["one"])
