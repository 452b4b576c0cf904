# SPDX-License-Identifier: Apache-2.0
"""Stored weights: packed once, shared by content, at cache lines, and put back as they were."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_host.compiler import weight_files
from rbln_host.compiler.artifact import Artifact, write_artifact
from rbln_host.compiler.graph import Captured, Command, Graph, TensorSpec
from rbln_host.compiler.pack import Layout, pack
from rbln_host.compiler.weight_files import Pending, read_weight_file, write_weight_file
from rbln_host.compiler.weights import ALIGNMENT, Weight, content_digest
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.options import Executor, ExecutorOptions
from rbln_host.runtime.weight_store import WeightStore
from tests.unit.host.native_layer import fused
from tests.unit.host.programs import manifest

REFERENCE = ExecutorOptions(Executor.REFERENCE)


def program(name: str, weights: dict[str, Tensor], *commands: Command) -> Captured:
    """A program of `%x` [3, 4] and `%ids` [2]; the weight `w` is the value `%w`."""
    inputs = {"%x": TensorSpec((3, 4), torch.float32), "%ids": TensorSpec((2,), torch.int64)}
    outputs = tuple(str(command.outputs[0]) for command in commands)
    graph = Graph(name, inputs, {f"%{n}": n for n in weights}, commands, outputs)
    return Captured(graph, weights)


def linear(name: str, weight: str, tensor: Tensor) -> Captured:
    command = fused("rbln::linear", "%x", f"%{weight}", None, None, "none", out=("%o",))
    return program(name, {weight: tensor}, command)


def lookup(name: str, weight: str, tensor: Tensor) -> Captured:
    command = fused("aten::embedding", f"%{weight}", "%ids", out=("%o",))
    return program(name, {weight: tensor}, command)


def stored_bytes(artifact: Artifact) -> int:
    """Bytes of all tensors in the weight files, without gaps."""
    files = (artifact.directory / "weights").iterdir()
    return sum(t.nbytes for path in files for t in read_weight_file(path).values())


def layouts(artifact: Artifact) -> dict[str, tuple[Layout, ...]]:
    return {name: tuple(weight.copies) for name, weight in artifact.weights().items()}


@pytest.fixture
def table() -> Tensor:
    return torch.randn(20, 4)


class TestLayouts:
    def test_of_a_linear_is_packed_only(self, tmp_path: Path, table: Tensor) -> None:
        artifact = write_artifact(tmp_path, manifest(), [linear("p", "w", table)])
        assert layouts(artifact) == {"w": (Layout.ROWS16,)}
        weight = Artifact.open(tmp_path).weights()["w"]
        assert weight.packed is not None
        assert torch.equal(weight.packed, pack(table))
        assert torch.equal(weight.plain(), table)
        assert stored_bytes(artifact) == pack(table).nbytes

    def test_of_a_lookup_is_plain(self, tmp_path: Path, table: Tensor) -> None:
        artifact = write_artifact(tmp_path, manifest(), [lookup("p", "w", table)])
        assert layouts(artifact) == {"w": (Layout.PLAIN,)}

    def test_of_a_tied_table_is_packed_only(self, tmp_path: Path, table: Tensor) -> None:
        items = [lookup("p", "embed", table), linear("q", "head", table)]
        artifact = write_artifact(tmp_path, manifest(), items)
        assert layouts(artifact) == {"embed": (Layout.ROWS16,)}
        assert stored_bytes(artifact) == pack(table).nbytes

    @pytest.mark.parametrize("order", [1, -1])
    def test_equal_contents_are_stored_once(
        self, tmp_path: Path, table: Tensor, order: int
    ) -> None:
        """As in checkpoints that hold a tied weight twice."""
        items = [lookup("p", "embed", table), linear("q", "head", table.clone())][::order]
        artifact = write_artifact(tmp_path, manifest(), items)
        assert layouts(artifact) == {"embed": (Layout.ROWS16,), "head": (Layout.ROWS16,)}
        assert stored_bytes(artifact) == pack(table).nbytes
        weights = artifact.weights()
        one, other = (weights[name].packed for name in ("embed", "head"))
        assert one is not None
        assert other is not None
        assert one.data_ptr() == other.data_ptr()

    def test_a_later_program_adds_the_layout_it_needs(self, tmp_path: Path, table: Tensor) -> None:
        first = write_artifact(tmp_path, manifest(), [lookup("p", "w", table)])
        second = write_artifact(tmp_path, first.manifest, [linear("q", "w", table)])
        assert layouts(second) == {"w": (Layout.PLAIN, Layout.ROWS16)}
        third = write_artifact(tmp_path, second.manifest, [lookup("r", "w", table)])
        assert third.manifest.weights == second.manifest.weights
        assert third.manifest.tensors == second.manifest.tensors

    def test_a_packed_one_serves_a_later_lookup(self, tmp_path: Path, table: Tensor) -> None:
        first = write_artifact(tmp_path, manifest(), [linear("p", "w", table)])
        second = write_artifact(tmp_path, first.manifest, [lookup("q", "w", table)])
        assert second.manifest.tensors == first.manifest.tensors
        assert second.manifest.weights == first.manifest.weights

    def test_both_executors_read_them(self, tmp_path: Path, table: Tensor) -> None:
        items = [lookup("p", "w", table), linear("q", "w", table)]
        artifact = write_artifact(tmp_path, manifest(), items)
        x, ids = torch.randn(3, 4), torch.tensor([7, 19])
        for options in (ExecutorOptions(cpus=(0,)), REFERENCE):
            executable = Executable(options)
            executable.add_artifact(artifact)
            inputs = {"%x": x, "%ids": ids}
            assert torch.equal(executable.run("p", inputs)[0], table[ids])
            torch.testing.assert_close(executable.run("q", inputs)[0], x @ table.T)
            assert executable.weight_bytes == pack(table).nbytes


class TestContent:
    def test_is_of_elements_shape_and_dtype(self) -> None:
        base = torch.arange(6.0)
        assert content_digest(base) == content_digest(base.clone())
        assert content_digest(base[::2]) == content_digest(base[::2].contiguous())
        others = (base.view(2, 3), base.view(torch.int32), base + 1, -base)
        assert len({content_digest(t) for t in (base, *others)}) == 5

    def test_bits_count_not_values(self) -> None:
        nan = torch.tensor([float("nan")])
        assert content_digest(nan) == content_digest(nan.clone())
        assert content_digest(torch.tensor([0.0])) != content_digest(torch.tensor([-0.0]))


class TestWeight:
    def test_needs_copies_of_its_shape(self) -> None:
        spec = TensorSpec((20, 4), torch.float32)
        plain = torch.ones(20, 4)
        Weight(spec, {Layout.PLAIN: plain, Layout.ROWS16: pack(plain)})
        for copies in (
            {},
            {Layout.PLAIN: pack(plain)},
            {Layout.ROWS16: plain},
            {Layout.PLAIN: plain.double()},
            {Layout.PLAIN: torch.ones(4, 20).t()},
        ):
            with pytest.raises(ValueError, match=r"layout|is no"):
                Weight(spec, copies)


class TestStore:
    def test_takes_each_once(self, table: Tensor) -> None:
        store = WeightStore()
        store.add([lookup("p", "w", table), linear("q", "w", table)])
        assert store.nbytes == pack(table).nbytes
        assert list(store["w"].copies) == [Layout.ROWS16]
        assert store.packed_specs == {"w": TensorSpec((20, 4), torch.float32)}

    def test_adds_the_layout_a_later_program_needs(self, table: Tensor) -> None:
        store = WeightStore()
        store.add([lookup("p", "w", table)])
        assert store.packed_specs == {}
        store.add([linear("q", "w", table)])
        assert list(store["w"].copies) == [Layout.PLAIN, Layout.ROWS16]
        assert store["w"].plain().data_ptr() == table.data_ptr(), "the plain one is not copied"

    def test_unpacks_once(self, table: Tensor) -> None:
        store = WeightStore()
        store.add([linear("p", "w", table)])
        assert store.plain("w") is store.plain("w")
        assert torch.equal(store.plain("w"), table)


class TestFiles:
    def test_tensors_start_at_cache_lines(self, tmp_path: Path) -> None:
        made = {
            f"{dtype}": (torch.arange(15) % 2).view(3, 5).to(dtype)
            for dtype in weight_files._DTYPE_NAMES
        }
        made |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
        items = [
            Pending(key, TensorSpec(tuple(t.shape), t.dtype), t.clone) for key, t in made.items()
        ]
        path = tmp_path / "file"
        write_weight_file(path, items)
        found = read_weight_file(path)
        assert found.keys() == made.keys()
        for key, tensor in made.items():
            assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
            assert content_digest(found[key]) == content_digest(tensor)
            assert found[key].data_ptr() % ALIGNMENT == 0

    def test_one_tensor_is_made_at_a_time(self, tmp_path: Path) -> None:
        made: list[weakref.ref[Tensor]] = []

        def make() -> Tensor:
            assert all(reference() is None for reference in made)
            tensor = torch.ones(4)
            made.append(weakref.ref(tensor))
            return tensor

        spec = TensorSpec((4,), torch.float32)
        write_weight_file(tmp_path / "file", [Pending(f"{i}", spec, make) for i in range(3)])
        assert len(made) == 3

    def test_dtypes_no_file_holds(self) -> None:
        with pytest.raises(ValueError, match=r"cannot hold torch\.complex128"):
            Pending("x", TensorSpec((1,), torch.complex128), lambda: torch.empty(1))
