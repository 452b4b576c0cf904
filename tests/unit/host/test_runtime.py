# SPDX-License-Identifier: Apache-2.0
"""Interpreter and executable: what they check, keep and drop."""

import itertools
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_host.compiler.artifact import write_artifact
from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.errors import ArtifactError, MissingProgramError
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.interpreter import Interpreter
from rbln_host.runtime.options import Executor, ExecutorOptions
from tests.unit.host.programs import call, manifest, scale_program

SPEC = TensorSpec((-1, 3), torch.float32)


def chain(*commands: Command, outputs: tuple[str, ...]) -> Interpreter:
    return Interpreter(Graph("p", {"x": SPEC}, {}, commands, outputs), {})


class TestInterpreter:
    def test_free_axes_take_any_size(self) -> None:
        program = chain(call("add", "x", 1, out="a"), outputs=("a",))
        for rows in (0, 1, 5):
            assert program.run({"x": torch.zeros(rows, 3)})[0].shape == (rows, 3)

    @pytest.mark.parametrize(
        ("inputs", "problem"),
        [
            ({}, "program p: input 'x' is missing"),
            ({"x": torch.zeros(2, 4)}, r"is torch.float32 \(2, 4\), not torch.float32 \(-1, 3\)"),
            ({"x": torch.zeros(3)}, "input 'x'"),
            ({"x": torch.zeros(2, 3, dtype=torch.float64)}, "torch.float64"),
        ],
    )
    def test_wrong_inputs(self, inputs: dict[str, Tensor], problem: str) -> None:
        program = chain(call("add", "x", 1, out="a"), outputs=("a",))
        with pytest.raises(ValueError, match=problem):
            program.run(inputs)

    def test_outputs_in_order_and_repeated(self) -> None:
        program = chain(call("add", "x", 1, out="a"), outputs=("a", "x", "a"))
        x = torch.zeros(1, 3)
        first, second, third = program.run({"x": x})
        assert second is x
        assert first is third

    def test_runs_are_independent(self) -> None:
        program = chain(call("add", "x", 1, out="a"), call("mul_", "a", 2, out="b"), outputs=("b",))
        first = program.run({"x": torch.zeros(1, 3)})[0]
        assert torch.equal(program.run({"x": torch.zeros(1, 3)})[0], first)

    def test_missing_weight(self) -> None:
        with pytest.raises(ArtifactError, match="program p reads the weight 'a'"):
            Interpreter(scale_program("p", {"a": torch.ones(2)}).graph, {})

    def test_no_gradients(self) -> None:
        weight = torch.ones(3, requires_grad=True)
        program = Interpreter(scale_program("p", {"w": weight}).graph, {"w": weight})
        assert not program.run({"x": torch.ones(3)})[0].requires_grad

    def test_values_are_dropped_after_their_last_use(self) -> None:
        alive: list[weakref.ref[Tensor]] = []
        seen: list[int] = []
        with torch.library._scoped_library("rbln", "FRAGMENT") as library:
            library.define("test_grow(Tensor x) -> Tensor")

            def grow(x: Tensor) -> Tensor:
                seen.append(sum(reference() is not None for reference in alive))
                result = x + 1
                alive.append(weakref.ref(result))
                return result

            library.impl("test_grow", grow, "CompositeExplicitAutograd")
            names = ["x", *(f"v{i}" for i in range(5))]
            commands = [
                Command("rbln::test_grow", "default", (Ref(a),), {}, (b,))
                for a, b in itertools.pairwise(names)
            ]
            unread = Command("rbln::test_grow", "default", (Ref("x"),), {}, ("u",))
            chain(*commands[:2], unread, *commands[2:], outputs=("v4",)).run(
                {"x": torch.zeros(1, 3)}
            )
        assert max(seen) <= 1, "one value is alive when the next is computed"

    def test_tuple_members(self) -> None:
        split = Command("aten::split", "Tensor", (Ref("x"), 1, 1), {}, (None, "b", None), True)
        x = torch.arange(3.0)[None]
        assert torch.equal(chain(split, outputs=("b",)).run({"x": x})[0], x[:, 1:2])

    def test_lists_of_values(self) -> None:
        cat = Command("aten::cat", "default", ((Ref("x"), Ref("x")), 0), {}, ("a",))
        stack = Command("aten::stack", "default", ((Ref("a"), Ref("a")),), {"dim": 1}, ("b",))
        output = chain(cat, stack, outputs=("b",)).run({"x": torch.ones(1, 3)})[0]
        assert output.shape == (2, 2, 3)


@pytest.fixture(params=list(Executor))
def executable(request: pytest.FixtureRequest) -> Executable:
    return Executable(ExecutorOptions(request.param, cpus=(0,)))


class TestExecutable:
    """On both executors."""

    def test_runs_programs_by_name(self, executable: Executable) -> None:
        executable.add(scale_program("one", {"a": torch.full((2,), 3.0)}))
        executable.add(scale_program("two", {"b": torch.full((2,), 5.0)}))
        assert executable.program_names == {"one", "two"}
        assert executable.run("two", {"x": torch.ones(2)})[0].tolist() == [5, 5]
        assert executable.weight_bytes == 16

    def test_unknown_program(self, executable: Executable) -> None:
        with pytest.raises(MissingProgramError, match="program other has not been compiled"):
            executable.run("other", {})

    def test_bound_inputs_stay_and_may_be_replaced(self, executable: Executable) -> None:
        executable.add(scale_program("p", {"w": torch.full((2,), 3.0)}))
        executable.bind({"x": torch.ones(2), "unread": torch.ones(1)})
        assert executable.run("p", {})[0].tolist() == [3, 3]
        assert executable.run("p", {"x": torch.zeros(2)})[0].tolist() == [0, 0]
        executable.bind({"x": torch.full((2,), 2.0)})
        assert executable.run("p", {})[0].tolist() == [6, 6]

    def test_programs_are_read_when_first_needed(
        self, executable: Executable, tmp_path: Path
    ) -> None:
        captured = [scale_program(name, {"w": torch.ones(2)}) for name in ("one", "two")]
        artifact = write_artifact(tmp_path, manifest(), captured)
        executable.add_artifact(artifact)
        (tmp_path / "programs/two.json").unlink()
        executable.load("one")
        with pytest.raises(ArtifactError):
            executable.load("two")
        assert executable.load("one") is executable.load("one")

    def test_weights_are_shared_by_programs(self, executable: Executable, tmp_path: Path) -> None:
        captured = [scale_program(name, {"w": torch.ones(2)}) for name in ("one", "two")]
        executable.add_artifact(write_artifact(tmp_path, manifest(), captured))
        assert executable.weight_bytes == 8

    def test_an_extended_artifact_replaces_the_old(
        self, executable: Executable, tmp_path: Path
    ) -> None:
        first = write_artifact(tmp_path, manifest(), [scale_program("one", {"w": torch.ones(2)})])
        executable.add_artifact(first)
        loaded = executable.load("one")
        more = scale_program("two", {"v": torch.full((2,), 4.0)})
        executable.add_artifact(write_artifact(tmp_path, first.manifest, [more]))
        assert executable.load("one") is loaded
        assert executable.run("two", {"x": torch.ones(2)})[0].tolist() == [4, 4]

    def test_several_programs_at_once_share_a_tied_weight(self, executable: Executable) -> None:
        tied = torch.full((2,), 3.0)
        executable.add(scale_program("one", {"a": tied}), scale_program("two", {"b": tied}))
        assert executable.weight_bytes == 8
        for name in ("one", "two"):
            assert executable.run(name, {"x": torch.ones(2)})[0].tolist() == [3, 3]

    def test_says_what_it_is(self, executable: Executable) -> None:
        assert executable.description.startswith(("native executor (", "reference executor ("))


def test_options() -> None:
    assert ExecutorOptions(cpus=(3, 1)).pool_cpus == [3, 1]
    assert ExecutorOptions().pool_cpus
    for wrong in ({"cpus": (1, 1)}, {"cpus": (-1,)}, {"spin_us": -1}):
        with pytest.raises(ValueError, match=r"CPUs|spin_us"):
            ExecutorOptions(**wrong)
