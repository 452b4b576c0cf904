# SPDX-License-Identifier: Apache-2.0
"""Whole programs on the native executor: equal to the reference, and how they are bound and run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rbln_host import _native
from rbln_host.compiler.graph import Captured, Graph, TensorSpec
from rbln_host.errors import ArtifactError, ExecutorError
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.interpreter import Interpreter
from rbln_host.runtime.native import NativeProgram, NativeRuntime, start_runtime
from rbln_host.runtime.native.memory import Arena
from rbln_host.runtime.native.segments import Compiler
from rbln_host.runtime.options import ExecutorOptions
from rbln_host.runtime.report import explain
from rbln_host.runtime.weight_store import WeightStore
from tests.unit.host.native_layer import fused, layer, step_inputs
from tests.unit.host.programs import call
from tests.unit.host.random_graphs import ROWS, WIDTH, graphs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
"""Largest difference as a share of the largest value: rounding of values between commands."""


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return start_runtime(ExecutorOptions(cpus=(0, 1)))


def store(captured: Captured) -> WeightStore:
    weights = WeightStore()
    weights.add([captured])
    return weights


def native(captured: Captured, runtime: NativeRuntime) -> NativeProgram:
    return NativeProgram(captured.graph, store(captured), runtime)


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if not expected.is_floating_point():
        assert torch.equal(found, expected)
        return
    limit = TOLERANCE[expected.dtype] * expected.abs().max().item()
    assert (found.float() - expected.float()).abs().max().item() <= limit


class TestAgreesWithTheReference:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("tokens", [1, 5, 11])
    def test_a_layer(self, tokens: int, dtype: torch.dtype, runtime: NativeRuntime) -> None:
        given = layer(tokens, dtype)
        reference_inputs, native_inputs = copies(given.inputs), copies(given.inputs)
        expected = Interpreter(given.captured.graph, given.captured.weights).run(reference_inputs)
        found = native(given.captured, runtime).run(native_inputs)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
        assert_close(native_inputs["%kv"], reference_inputs["%kv"])

    def test_no_command_of_the_layer_falls_back(self, runtime: NativeRuntime) -> None:
        captured = layer(5, torch.bfloat16).captured
        report = explain(captured.graph, store(captured), runtime.compiler)
        assert report.fallbacks == ()
        assert report.native_commands == report.commands == 13

    @given(graph=graphs())
    @settings(max_examples=60)
    def test_any_program_and_its_fallbacks(self, graph: Graph) -> None:
        """Commands of random programs that kernels do not take run between those that they do."""
        self._compare(graph, start_runtime(ExecutorOptions(cpus=(0,))))

    @given(graph=graphs())
    @settings(max_examples=60)
    def test_fallbacks_alone(self, graph: Graph) -> None:
        self._compare(graph, NativeRuntime(Compiler(Refusing(), "none"), _native.Pool([0])))

    def _compare(self, graph: Graph, runtime: NativeRuntime) -> None:
        captured = Captured(graph, {"w": torch.randn(ROWS, WIDTH)})
        inputs = {name: torch.randn(ROWS, WIDTH) for name in ("x", "y")}
        expected = Interpreter(graph, captured.weights).run(copies(inputs))
        program = native(captured, runtime)
        runtime.arena.memory.fill_(255)  # NaN
        for _ in range(2):
            for one, other in zip(program.run(inputs), expected, strict=True):
                assert torch.equal(one, other)


class TestRowsAreIndependent:
    """Bit for bit: a row's result is the same in every program, whatever its neighbours are."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_the_size_of_the_program(self, dtype: torch.dtype, runtime: NativeRuntime) -> None:
        weights = layer(11, dtype).captured.weights
        longest = self._logits(11, dtype, weights, runtime)
        for tokens in (1, 2, 5, 8):
            found = self._logits(tokens, dtype, weights, runtime)
            assert torch.equal(found, longest[:tokens])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_padding(self, dtype: torch.dtype, runtime: NativeRuntime) -> None:
        weights = layer(8, dtype).captured.weights
        expected = self._logits(5, dtype, weights, runtime)
        padded = step_inputs(8, dtype)
        for name, value in {"%ids": 0, "%positions": 0, "%slots": -1, "%query_pos": -1}.items():
            padded[name][5:] = value
        pool = padded["%kv"].fill_(float("nan"))
        found = self._logits(8, dtype, weights, runtime, padded)
        assert torch.equal(found[:5], expected)
        written = (~pool.isnan()).any(dim=3).any(dim=1)
        assert written.nonzero().tolist() == [[1, 0], [4, 0], [4, 1], [4, 2], [4, 3]]

    def _logits(
        self,
        tokens: int,
        dtype: torch.dtype,
        weights: Mapping[str, Tensor],
        runtime: NativeRuntime,
        inputs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        captured = Captured(layer(tokens, dtype).captured.graph, weights)
        given = step_inputs(tokens, dtype) if inputs is None else inputs
        runtime.arena.memory.fill_(255)  # NaN
        return native(captured, runtime).run(given)[0].clone()


class Refusing:
    """An extension whose kernels take nothing."""

    Pool, KVCopier = _native.Pool, _native.KVCopier
    Tensor, Command = _native.Tensor, _native.Command
    isa_levels = staticmethod(_native.isa_levels)

    def Program(self, *_: Any) -> NoReturn:  # noqa: N802
        raise ValueError("this kernel takes nothing")


@pytest.fixture
def add_one(runtime: NativeRuntime) -> NativeProgram:
    """`x + 1` for any number of rows, and `x` itself."""
    command = fused("rbln::elementwise", ("%x",), "i0 c1.0 add", out=("o",))
    spec = TensorSpec((-1, 4), torch.float32)
    return native(Captured(Graph("add", {"%x": spec}, {}, (command,), ("o", "%x")), {}), runtime)


class TestInputs:
    def test_the_same_buffers_are_returned(self, add_one: NativeProgram) -> None:
        x = torch.zeros(2, 4)
        first = add_one.run({"%x": x})
        x.fill_(3)
        second = add_one.run({"%x": x})
        assert all(a is b for a, b in zip(first, second, strict=True))
        assert first[0].unique().tolist() == [4]
        assert first[1].data_ptr() == x.data_ptr()

    def test_another_tensor_is_bound(self, add_one: NativeProgram) -> None:
        for value in (1.0, 5.0):
            output, same = add_one.run({"%x": torch.full((2, 4), value)})
            assert output.unique().tolist() == [value + 1]
            assert same.unique().tolist() == [value]

    def test_a_tensor_that_moved_is_bound(self, add_one: NativeProgram) -> None:
        x = torch.zeros(2, 4)
        add_one.run({"%x": x})
        x.data = torch.full((2, 4), 6.0)
        assert add_one.run({"%x": x})[0].unique().tolist() == [7]

    def test_part_of_a_tensor_is_bound(self, runtime: NativeRuntime) -> None:
        """By kernels, which get its address, and by what torch runs."""
        spec = TensorSpec((2, 4), torch.float32)
        kernel = fused("rbln::elementwise", ("%x",), "i0 c1.0 add", out=("%a",))
        other = fused("aten::cumsum", "%x", 0, out=("%b",))
        graph = Graph("p", {"%x": spec}, {}, (kernel, other), ("%a", "%b"))
        part = torch.arange(16.0).view(4, 4)[1:3]
        added, summed = native(Captured(graph, {}), runtime).run({"%x": part})
        assert torch.equal(added, part + 1)
        assert torch.equal(summed, part.cumsum(0))

    def test_other_sizes_of_a_free_axis(self, add_one: NativeProgram) -> None:
        for rows in (3, 1, 8, 0, 3):
            output, _ = add_one.run({"%x": torch.full((rows, 4), float(rows))})
            assert output.shape == (rows, 4)
            assert output.unique().tolist() == ([rows + 1] if rows else [])

    @pytest.mark.parametrize(
        ("tensor", "problem"),
        [
            (None, "program add: input '%x' is missing"),
            (torch.zeros(2, 5), r"is torch.float32 \(2, 5\), not torch.float32 \(-1, 4\)"),
            (torch.zeros(2, 4, dtype=torch.float64), "is torch.float64"),
            (torch.zeros(4, 2).t(), "make it contiguous"),
        ],
    )
    def test_wrong(self, add_one: NativeProgram, tensor: Tensor | None, problem: str) -> None:
        wrong = {} if tensor is None else {"%x": tensor}
        for _ in range(2):
            with pytest.raises(ValueError, match=problem):
                add_one.run(wrong)
            assert add_one.run({"%x": torch.zeros(2, 4)})[0].unique().tolist() == [1]

    def test_bound_inputs(self, add_one: NativeProgram) -> None:
        bound = {"%x": torch.full((2, 4), 1.0), "other": torch.zeros(1)}
        assert add_one.run({}, bound)[0].unique().tolist() == [2]
        for _ in range(2):
            assert add_one.run({"%x": torch.full((2, 4), 5.0)}, bound)[0].unique().tolist() == [6]
            assert add_one.run({}, bound)[0].unique().tolist() == [2]
        assert add_one.run({}, {"%x": torch.full((3, 4), 7.0)})[0].unique().tolist() == [8]
        with pytest.raises(ValueError, match="is missing"):
            add_one.run({}, {})


class TestMemory:
    def test_outputs_outlive_other_programs(self) -> None:
        """Programs share the arena, which grows, and never their results."""
        executable = Executable(ExecutorOptions(cpus=(0,)))
        given = {f"p{tokens}": layer(tokens, torch.float32) for tokens in (3, 9)}
        for name, item in given.items():
            graph = replace(item.captured.graph, name=name)
            executable.add(Captured(graph, item.captured.weights))
        outputs = executable.run("p3", copies(given["p3"].inputs))
        kept, small = [output.clone() for output in outputs], executable.runtime.arena.memory
        executable.run("p9", copies(given["p9"].inputs))
        assert executable.runtime.arena.memory is not small
        assert all(torch.equal(a, b) for a, b in zip(outputs, kept, strict=True))
        again = executable.run("p3", copies(given["p3"].inputs))
        assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))

    def test_the_arena_only_grows(self) -> None:
        arena = Arena()
        arena.reserve(64)
        memory = arena.memory
        arena.reserve(32)
        assert arena.memory is memory
        arena.reserve(128)
        assert arena.memory.nbytes == 128

    def test_results_are_the_same_for_any_number_of_threads(self) -> None:
        given = layer(11, torch.bfloat16)
        found = [
            native(given.captured, start_runtime(ExecutorOptions(cpus=cpus))).run(
                copies(given.inputs)
            )
            for cpus in ((0,), (0, 1))
        ]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_a_result_nobody_reads_has_a_place(self, runtime: NativeRuntime) -> None:
        """The sum of the last norm is written by the kernel although the program drops it."""
        given = layer(2, torch.float32)
        assert given.captured.graph.commands[-4].outputs == ("%n2", None)
        native(given.captured, runtime).run(copies(given.inputs))

    def test_constants_are_computed_once(
        self, runtime: NativeRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands = (
            call("exp", "w", out="e", overload="default"),
            call("mul", "e", "x", out="o"),
        )
        spec = TensorSpec((3,), torch.float32)
        weight = torch.zeros(3)
        graph = Graph("p", {"x": spec}, {"w": "w"}, commands, ("o",))
        program = native(Captured(graph, {"w": weight}), runtime)
        weight.fill_(5)  # seen only if the program computes it again
        assert program.run({"x": torch.ones(3)})[0].tolist() == [1, 1, 1]


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "value"), [("%ids", 40), ("%ids", -1), ("%slots", 4000), ("%positions", 16)]
    )
    def test_indices_out_of_range_name_the_program(
        self, name: str, value: int, runtime: NativeRuntime
    ) -> None:
        given = layer(5, torch.float32)
        program = native(given.captured, runtime)
        inputs = copies(given.inputs)
        inputs[name][3] = value
        with pytest.raises(IndexError, match=f"program layer: .*{value}"):
            program.run(inputs)
        inputs[name][3] = given.inputs[name][3]
        program.run(inputs)

    def test_a_block_outside_the_pool(self, runtime: NativeRuntime) -> None:
        given = layer(5, torch.float32)
        inputs = copies(given.inputs)
        inputs["%table"][0, 0] = 600
        with pytest.raises(IndexError, match="block 600"):
            native(given.captured, runtime).run(inputs)

    def test_a_fallback_that_fails_names_the_program(self, runtime: NativeRuntime) -> None:
        commands = (call("gather", "x", 0, "i", out="o", overload="default"),)
        inputs = {"x": TensorSpec((3,), torch.float32), "i": TensorSpec((1,), torch.int64)}
        program = native(Captured(Graph("p", inputs, {}, commands, ("o",)), {}), runtime)
        with pytest.raises(RuntimeError, match="program p: index 7 is out of bounds"):
            program.run({"x": torch.zeros(3), "i": torch.tensor([7])})

    def test_a_program_that_cannot_run(self, runtime: NativeRuntime) -> None:
        graph = Graph("p", {"x": TensorSpec((3,), torch.float32)}, {}, (), ("x",))
        wrong = replace(graph, commands=(call("view", "x", (5,), out="o", overload="default"),))
        with pytest.raises(ArtifactError, match="program p: aten::view"):
            native(Captured(wrong, {}), runtime)
        missing = replace(graph, weights={"w": "gone"})
        with pytest.raises(ArtifactError, match="weight 'gone'"):
            native(Captured(missing, {}), runtime)

    def test_more_memory_than_there_is(self, runtime: NativeRuntime) -> None:
        large = call("expand", "x", (1 << 30, 1 << 20), out="e", overload="default")
        copied = call("exp", "e", out="c", overload="default")
        spec = TensorSpec((1,), torch.float32)
        graph = Graph("p", {"x": spec}, {}, (large, copied), ("c",))
        with pytest.raises(MemoryError, match="programs need 4294967296 MiB"):
            native(Captured(graph, {}), runtime)

    def test_an_instruction_set_that_is_not_there(self) -> None:
        with pytest.raises(ExecutorError, match=r"'sse' was asked for .* this CPU has portable"):
            start_runtime(ExecutorOptions(isa="sse"))

    def test_no_extension(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> NoReturn:
            raise ImportError(f"no module {name}")

        monkeypatch.setattr("rbln_host.runtime.native.extension.import_module", fail)
        with pytest.raises(ExecutorError, match="RBLN_HOST_EXECUTOR=reference"):
            start_runtime(ExecutorOptions())


@pytest.mark.parametrize("isa", start_runtime(ExecutorOptions()).compiler.extension.isa_levels())
def test_every_instruction_set_runs_the_layer(isa: str) -> None:
    given = layer(9, torch.bfloat16)
    expected = Interpreter(given.captured.graph, given.captured.weights).run(copies(given.inputs))
    found = native(given.captured, start_runtime(ExecutorOptions(isa=isa))).run(
        copies(given.inputs)
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
