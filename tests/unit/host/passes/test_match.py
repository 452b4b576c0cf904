# SPDX-License-Identifier: Apache-2.0
"""Patterns over the commands that lead to a value."""

from typing import Any

import pytest

from rbln_host.compiler.graph import Ref
from rbln_host.compiler.passes.match import (
    Either,
    Match,
    Number,
    Op,
    Pattern,
    Var,
    match,
    match_command,
)
from rbln_host.compiler.passes.rewrite import Editor
from tests.unit.host.passes.build import Build

X = Var("x")


def editor(*calls: tuple[Any, ...], **kwargs: Any) -> Editor:
    """After commands that end in ``out``, the last of which has these keyword arguments."""
    b = Build(a=(2, 3), b=(2, 3))
    for call in calls[:-1]:
        b(*call)
    b(*calls[-1], **kwargs)
    captured = b.captured("out")
    made = Editor(captured)
    made.emit(captured.graph.commands)
    return made


def found(pattern: Pattern, *calls: tuple[Any, ...], **kwargs: Any) -> Match | None:
    return match(editor(*calls, **kwargs), pattern, Ref("out"))


def test_variables_stand_for_arguments() -> None:
    pattern = Op("aten::sub", Op("aten::neg", X), Var("y"))
    result = found(pattern, ("n = neg", "a"), ("out = sub.Tensor", "n", "b"))
    assert result is not None
    assert result.found == {"x": Ref("a"), "y": Ref("b")}
    assert [command.outputs for command in result.commands] == [("out",), ("n",)]


@pytest.mark.parametrize(("second", "matches"), [("a", True), ("b", False)])
def test_a_variable_stands_for_one_argument(second: str, *, matches: bool) -> None:
    pattern = Op("aten::mul", X, Op("aten::sigmoid", X))
    result = found(pattern, ("s = sigmoid", second), ("out = mul.Tensor", "a", "s"))
    assert (result is not None) == matches


@pytest.mark.parametrize("operator", ["add.Tensor", "mul.Tensor"])
def test_sums_and_products_in_either_order(operator: str) -> None:
    pattern = Op(f"aten::{operator.partition('.')[0]}", Op("aten::neg", X), Var("y"))
    for args in (("n", "b"), ("b", "n")):
        result = found(pattern, ("n = neg", "a"), (f"out = {operator}", *args))
        assert result is not None
        assert result.found == {"x": Ref("a"), "y": Ref("b")}


def test_an_order_is_tried_again_where_what_follows_does_not_fit() -> None:
    """``y`` first stands for ``s``; only the other order gives the same ``y`` twice."""
    pattern = Op("aten::sub", Op("aten::mul", Var("y"), X), Var("y"))
    calls = [("m = mul.Tensor", "a", "b"), ("out = sub.Tensor", "m", "b")]
    result = found(pattern, *calls)
    assert result is not None
    assert result.found == {"x": Ref("a"), "y": Ref("b")}


@pytest.mark.parametrize("operator", ["sub.Tensor", "div.Tensor"])
def test_differences_and_quotients_in_their_order(operator: str) -> None:
    pattern = Op(f"aten::{operator.partition('.')[0]}", Op("aten::neg", X), Var("y"))
    assert found(pattern, ("n = neg", "a"), (f"out = {operator}", "b", "n")) is None


def test_keywords_and_further_arguments_do_not_match() -> None:
    pattern = Op("aten::add", X, Var("y"))
    assert found(pattern, ("out = add.Tensor", "a", "b")) is not None
    assert found(pattern, ("out = add.Tensor", "a", "b"), alpha=2) is None
    assert found(Op("aten::sum", X), ("out = sum.dim_IntList", "a", [1])) is None


@pytest.mark.parametrize(
    ("number", "matches"), [(1.702, True), (1.70201, True), (1.71, False), (-1.702, False)]
)
def test_numbers_match_nearly(number: float, *, matches: bool) -> None:
    pattern = Op("aten::mul", X, Number(1.702))
    assert (found(pattern, ("out = mul.Tensor", "a", number)) is not None) == matches


def test_values_are_no_numbers() -> None:
    assert found(Op("aten::mul", X, Number(1.0)), ("out = mul.Tensor", "a", "b")) is None
    assert (
        found(Op("aten::dropout", X, Number(0.0), Number(1.0)), ("out = dropout", "a", 0.0, True))
        is None
    )


def test_other_arguments_are_taken_literally() -> None:
    calls = [("out = mean.dim", "a", [-1], True)]
    assert found(Op("aten::mean", X, (-1,), True), *calls) is not None
    assert found(Op("aten::mean", X, (-1,), False), *calls) is None
    assert found(Op("aten::mean", X, (0,), True), *calls) is None
    assert found(Op("aten::dropout", X, False, False), ("out = dropout", "a", 0, False)) is None


def test_one_of_several_forms() -> None:
    pattern = Either((Op("aten::square", X), Op("aten::mul", X, X)))
    assert found(pattern, ("out = square", "a")) is not None
    assert found(pattern, ("out = mul.Tensor", "a", "a")) is not None
    assert found(pattern, ("out = mul.Tensor", "a", "b")) is None


def test_a_command_is_matched_by_itself() -> None:
    made = editor(("n = neg", "a"), ("out = mul.Tensor", "n", "b"))
    command = made.producer(Ref("out"))
    assert command is not None
    result = match_command(made, Op("aten::mul", Op("aten::neg", X), Var("y")), command)
    assert result is not None
    assert [inner.outputs for inner in result.commands] == [("n",)]
    assert match_command(made, Op("aten::add", Var("y"), Var("z")), command) is None


@pytest.mark.parametrize(("reader", "private"), [(None, True), ("n", False), ("a", True)])
def test_private_is_what_nothing_else_reads(reader: str | None, *, private: bool) -> None:
    extra = [("other = abs", reader)] if reader else []
    made = editor(("n = neg", "a"), *extra, ("out = mul.Tensor", "n", "n"))
    command = made.producer(Ref("out"))
    assert command is not None
    result = match_command(made, Op("aten::mul", Op("aten::neg", X), Op("aten::neg", X)), command)
    assert result is not None
    assert result.is_private(made, command) == private
