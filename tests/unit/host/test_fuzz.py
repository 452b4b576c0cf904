# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged artifacts: refused in words or loaded, never another error, never a crash.

The digests in the manifest are those of the forgery, as whoever forges a file would write them.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rbln_host.compiler.artifact import Artifact, write_artifact
from rbln_host.compiler.files import digest
from rbln_host.compiler.manifest import MANIFEST
from rbln_host.errors import ArtifactError
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.native import NativeRuntime, start_runtime
from rbln_host.runtime.options import Executor, ExecutorOptions
from tests.unit.host.native_layer import layer, step_inputs
from tests.unit.host.programs import manifest

PROGRAM, WEIGHTS = "programs/layer.json", "weights/00000.safetensors"
FUZZ = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
REFUSED_RUN = (ArtifactError, ValueError, IndexError, RuntimeError, MemoryError)
"""What running a forgery may raise: that it cannot run, or does not take these inputs."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of one program."""
    directory = tmp_path_factory.mktemp("fuzz") / "entry"
    write_artifact(directory, manifest(), [layer(3, torch.float32).captured])
    return directory


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return start_runtime(ExecutorOptions(cpus=(0,)))


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes, int], bytes]:
    """A change to the first bytes of a file: flips, or a part cut out, doubled or moved."""
    kind = draw(st.sampled_from(["flip", "digit", "cut", "double", "truncate", "swap"]))
    places = [draw(st.floats(0, 1, exclude_max=True)) for _ in range(3)]
    byte = draw(st.integers(1, 255))

    def change(data: bytes, region: int) -> bytes:
        first, second, third = sorted(int(place * region) for place in places)
        if kind == "flip":
            return data[:first] + bytes([data[first] ^ byte]) + data[first + 1 :]
        if kind == "digit":
            return data[:first] + str(byte % 10).encode() + data[first + 1 :]
        if kind == "cut":
            return data[:first] + data[second:]
        if kind == "double":
            return data[:second] + data[first:]
        if kind == "swap":
            return data[:first] + data[second:third] + data[first:second] + data[third:]
        return data[:first]

    return change


def forge(original: Path, directory: Path, relative: str, content: bytes) -> None:
    """A copy of the artifact with other bytes in one file, whose digest the manifest gives."""
    document = json.loads((original / MANIFEST).read_text())
    for group in ("programs", "weights"):
        for entry in document[group].values():
            data = content if entry["path"] == relative else (original / entry["path"]).read_bytes()
            path = directory / entry["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            entry["size"], entry["blake3"] = len(data), digest(data)
    (directory / MANIFEST).write_text(json.dumps(document))


def use(directory: Path, runtime: NativeRuntime) -> None:
    """Load what loads, on both executors, and run it."""
    for executor in Executor:
        executable = Executable(ExecutorOptions(executor))
        executable.runtime = runtime
        try:
            executable.add_artifact(Artifact.open(directory))
            for name in executable.program_names:
                executable.load(name)
        except ArtifactError:
            return
        with suppress(*REFUSED_RUN):
            executable.run("layer", step_inputs(3, torch.float32))


@given(change=damages())
@FUZZ
def test_programs(
    original: Path, runtime: NativeRuntime, tmp_path: Path, change: Callable[[bytes, int], bytes]
) -> None:
    data = (original / PROGRAM).read_bytes()
    forge(original, tmp_path, PROGRAM, change(data, len(data)))
    use(tmp_path, runtime)


@given(change=damages())
@FUZZ
def test_headers_of_weight_files(
    original: Path, runtime: NativeRuntime, tmp_path: Path, change: Callable[[bytes, int], bytes]
) -> None:
    data = (original / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    forge(original, tmp_path, WEIGHTS, change(data, header))
    use(tmp_path, runtime)


@given(change=damages())
@FUZZ
def test_manifests(
    original: Path, runtime: NativeRuntime, tmp_path: Path, change: Callable[[bytes, int], bytes]
) -> None:
    forge(original, tmp_path, "", b"")
    data = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_bytes(change(data, len(data)))
    use(tmp_path, runtime)


def test_the_original_loads_and_runs(original: Path, tmp_path: Path) -> None:
    """The forger's copy is as good as the original, so what is refused above is the damage."""
    forge(original, tmp_path, PROGRAM, (original / PROGRAM).read_bytes())
    executable = Executable(ExecutorOptions(cpus=(0,)))
    executable.add_artifact(Artifact.open(tmp_path))
    given_layer = layer(3, torch.float32)
    expected = Executable(ExecutorOptions(Executor.REFERENCE))
    expected.add(given_layer.captured)
    inputs = step_inputs(3, torch.float32)
    found = executable.run("layer", inputs)[0]
    torch.testing.assert_close(found, expected.run("layer", given_layer.inputs)[0])
