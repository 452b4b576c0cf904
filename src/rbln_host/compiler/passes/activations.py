# SPDX-License-Identifier: Apache-2.0
"""Activations, as one operator or written out."""

from rbln_host.compiler.graph import Argument, Command, Ref
from rbln_host.compiler.passes.match import Either, Match, Number, Op, Var, match_command
from rbln_host.compiler.passes.rewrite import Editor

_X = Var("x")


def _mul(*args: object) -> Op:
    return Op("aten::mul", *args)  # type: ignore[arg-type]


def _add(*args: object) -> Op:
    return Op("aten::add", *args)  # type: ignore[arg-type]


_HALF = Either((_mul(_X, Number(0.5)), Op("aten::div", _X, Number(2.0))))
_SQUARE = Either((Op("aten::pow", _X, Number(2.0)), _mul(_X, _X), Op("aten::square", _X)))
_CUBE = Either((Op("aten::pow", _X, Number(3.0)), _mul(_SQUARE, _X)))
_INNER = Either(
    (
        _mul(_add(_X, _mul(_CUBE, Number(0.044715))), Number(0.7978845608)),
        _mul(
            _mul(_X, Number(0.7978845608)),
            _add(_mul(_mul(_X, Number(0.044715)), _X), Number(1.0)),
        ),
    )
)
_ERF = Op("aten::erf", Either((Op("aten::div", _X, Number(2**0.5)), _mul(_X, Number(0.5**0.5)))))
_RELU = Op("aten::relu", _X)

_WRITTEN_OUT: dict[str, Op | Either] = {
    "gelu_tanh": _mul(_HALF, _add(Op("aten::tanh", _INNER), Number(1.0))),
    "gelu": _mul(_HALF, _add(_ERF, Number(1.0))),
    "quick_gelu": _mul(_X, Op("aten::sigmoid", _mul(_X, Number(1.702)))),
    "silu": _mul(_X, Op("aten::sigmoid", _X)),
    "relu2": Either((Op("aten::pow", _RELU, Number(2.0)), Op("aten::square", _RELU))),
}
_OPERATORS = {f"aten::{name}": name for name in ("relu", "silu", "tanh", "sigmoid")}
_WRITTEN_OUT_ROOTS = frozenset({"aten::mul", "aten::pow", "aten::square"})
ACTIVATION_ROOTS = _WRITTEN_OUT_ROOTS | _OPERATORS.keys() | {"aten::gelu"}
"""Operators with which an activation ends."""


def activation_of(editor: Editor, command: Command) -> tuple[str, Argument, Match] | None:
    """The activation that ends in this command: its name, of what, and the commands before.

    Names are those of ``rbln_host.ops.ACTIVATIONS``. Values inside have no other reader.
    """
    name = _single(command)
    if name is not None:
        return name, command.args[0], Match({"x": command.args[0]}, ())
    if command.operator not in _WRITTEN_OUT_ROOTS:
        return None
    for name, pattern in _WRITTEN_OUT.items():
        found = match_command(editor, pattern, command)
        if found is not None and found.is_private(editor, command):
            return name, found.found["x"], found
    return None


def is_square(command: Command) -> bool:
    """Whether it multiplies one value with itself."""
    args = command.args
    if command.operator == "aten::pow":
        return args[1] == 2 and isinstance(args[0], Ref)
    return command.operator == "aten::square" or (
        command.operator == "aten::mul" and args[0] == args[1]
    )


def _single(command: Command) -> str | None:
    if command.operator == "aten::gelu" and len(command.args) == 1:
        approximate = command.kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    plain = len(command.args) == 1 and not command.kwargs
    return _OPERATORS.get(command.operator) if plain else None
