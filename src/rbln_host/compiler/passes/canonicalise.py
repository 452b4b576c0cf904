# SPDX-License-Identifier: Apache-2.0
"""Pass: one form for what can be written in several.

``linear``, ``addmm``, ``mm`` and ``matmul`` with a weight become ``rbln::linear``; ``layer_norm``
and ``rms_norm`` become ours; ``type_as`` becomes the cast it is; pieces of no size are left out of
``cat``; copies that change nothing are left out, and so are casts of row numbers and what is added
to them before a lookup.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rbln_host.compiler.graph import Argument, Captured, Command, Ref
from rbln_host.compiler.passes.match import ref
from rbln_host.compiler.passes.rewrite import Editor, Made, rewrite

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that fused operators take."""

_TRANSPOSES = frozenset({"aten::t", "aten::transpose", "aten::permute", "aten::numpy_T"})
_LAYER_NORM_DEFAULTS: tuple[Argument, ...] = (None, None, 1e-5)
"""Weight, bias and epsilon of ``aten::layer_norm`` when they are not given."""
_INDEX_DTYPES = (torch.int32, torch.int64)


def canonicalise(captured: Captured, made: Made | None = None) -> Captured:
    """Rewrite each command to the form that later passes look for."""

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        return _FORMS[command.operator](editor, command)

    return rewrite(captured, rule, roots=frozenset(_FORMS), made=made)


def linear_command(
    source: Argument,
    weight: Argument,
    output: str,
    *,
    bias: Argument = None,
    residual: Argument = None,
    activation: str = "none",
) -> Command:
    """``output = rbln::linear(...)``."""
    args = (source, weight, bias, residual, activation)
    return Command("rbln::linear", "default", args, {}, (output,))


def _linear(editor: Editor, command: Command) -> list[Command] | None:
    if command.kwargs or not command.outputs[0]:
        return None
    source, weight, bias = (*command.args, None)[:3]
    return _as_linear(editor, command, source, weight, bias)


def _product(editor: Editor, command: Command) -> list[Command] | None:
    """``mm`` and ``matmul``: ``source @ other``."""
    if command.kwargs or not command.outputs[0]:
        return None
    return _as_linear(editor, command, command.args[0], _transposed(editor, command.args[1]), None)


def _addmm(editor: Editor, command: Command) -> list[Command] | None:
    """``addmm``: ``bias + source @ other``."""
    if command.kwargs or len(command.args) != 3:
        return None
    bias, source, other = command.args
    return _as_linear(editor, command, source, _transposed(editor, other), bias)


def _transposed(editor: Editor, argument: Argument) -> Argument:
    """The weight whose transpose the argument is; a new one when it is itself a weight."""
    command = editor.producer(argument)
    if command is not None and command.operator in _TRANSPOSES:
        source = command.args[0]
        tensor, turned = editor.tensor(source), editor.tensor(argument)
        if tensor is None or turned is None or tensor.dim() != 2:
            return None
        return source if turned.stride() == tensor.stride()[::-1] else None
    weight = editor.weight(argument)
    tensor = editor.tensor(argument)
    if weight is None or tensor is None or tensor.dim() != 2:
        return None
    return editor.new_weight(f"{weight}^T", (weight,), lambda parts: parts[0].t().contiguous())


def _as_linear(
    editor: Editor, command: Command, source: Argument, weight: Argument, bias: Argument
) -> list[Command] | None:
    """``rbln::linear``, when shapes and dtypes are what it takes and the weight is a weight."""
    output = command.outputs[0]
    tensor, matrix = editor.tensor(source), editor.weight_tensor(weight)
    if matrix is None or tensor is None or output is None:
        return None
    if matrix.dim() != 2 or tensor.dim() < 2 or tensor.shape[-1] != matrix.shape[1]:
        return None
    if tensor.dtype not in FLOATS or tensor.dtype != matrix.dtype:
        return None
    if bias is not None and not _is_bias(editor, bias, matrix):
        return None
    return [linear_command(source, weight, output, bias=bias)]


def _is_bias(editor: Editor, bias: Argument, matrix: Tensor) -> bool:
    tensor = editor.tensor(bias)
    if tensor is None or not editor.is_stable(bias):
        return False
    return tuple(tensor.shape) == (matrix.shape[0],) and tensor.dtype == matrix.dtype


def _layer_norm(editor: Editor, command: Command) -> list[Command] | None:
    source, sizes = command.args[:2]
    given = command.args[2:5]
    weight, bias, epsilon = given + _LAYER_NORM_DEFAULTS[len(given) :]
    if command.kwargs or not _norms_last(editor, source, sizes):
        return None
    if not _same_dtype(editor, source, weight, bias):
        return None
    args = (source, weight, bias, float(epsilon))
    return [Command("rbln::layer_norm", "default", args, {}, command.outputs)]


def _rms_norm(editor: Editor, command: Command) -> list[Command] | None:
    if command.kwargs or len(command.args) != 4 or command.args[3] is None:
        return None
    source, sizes, weight, epsilon = command.args
    if not _norms_last(editor, source, sizes) or not _same_dtype(editor, source, weight):
        return None
    args = (source, weight, float(epsilon), 0)
    return [Command("rbln::rms_norm", "default", args, {}, command.outputs)]


def _norms_last(editor: Editor, source: Argument, sizes: Argument) -> bool:
    tensor = editor.tensor(source)
    return tensor is not None and tensor.dtype in FLOATS and len(sizes) == 1


def _same_dtype(editor: Editor, *arguments: Argument) -> bool:
    tensors = [editor.tensor(a) for a in arguments if a is not None]
    return len({tensor.dtype for tensor in tensors if tensor is not None}) == 1


def _lookup(index: int) -> Callable[[Editor, Command], list[Command] | None]:
    """A table lookup whose row numbers, argument ``index``, may be of either integer dtype.

    A number that is added to all of them is left out: the table then begins at that row.
    """

    def form(editor: Editor, command: Command) -> list[Command] | None:
        table, rows = command.args[0], command.args[index]
        shifted = _shifted(editor, table, _without_cast(editor, rows))
        if shifted is not None:
            table, rows = shifted
        found = _without_cast(editor, rows)
        if (table, found) == (command.args[0], command.args[index]):
            return None
        args = (table, *command.args[1:index], found, *command.args[index + 1 :])
        return [Command(command.operator, command.overload, args, command.kwargs, command.outputs)]

    return form


def _without_cast(editor: Editor, rows: Argument) -> Argument:
    """The integers of which these are a copy in int64; themselves if they are none."""
    cast = editor.producer(rows)
    if cast is None or (cast.operator, cast.overload) != ("aten::to", "dtype"):
        return rows
    source = cast.args[0]
    tensor, wide = editor.tensor(source), editor.tensor(rows)
    if tensor is None or wide is None or not editor.is_stable(source):
        return rows
    narrow = tensor.dtype in _INDEX_DTYPES and wide.dtype == torch.int64
    return source if narrow else rows


def _shifted(editor: Editor, table: Argument, rows: Argument) -> tuple[Argument, Argument] | None:
    """The weight ``table`` from its row ``n`` on, and row numbers of which ``rows`` are ``+ n``."""
    added = editor.producer(rows)
    if added is None or added.operator != "aten::add" or added.kwargs or len(added.args) != 2:
        return None
    source, number = added.args
    weight, tensor = editor.weight(table), editor.tensor(source)
    whole = editor.weight_tensor(table)
    if weight is None or whole is None or type(number) is not int or tensor is None:
        return None
    if tensor.dtype not in _INDEX_DTYPES or not editor.is_stable(source):
        return None
    if whole.dim() != 2 or not 0 < number < whole.shape[0]:
        return None
    name = f"{weight}[{number}:]"
    return editor.new_weight(name, (weight,), lambda parts: parts[0][number:]), source


def _cat(editor: Editor, command: Command) -> list[Command] | None:
    pieces = command.args[0]
    output = command.outputs[0]
    kept = tuple(p for p in pieces if _numel(editor, p))
    if output is None or len(kept) == len(pieces) or not kept:
        return None
    if not _same_dtype(editor, *pieces):
        return None
    if len(kept) == 1 and _is_copy(editor, kept[0], output):
        editor.alias(output, kept[0].name)
        return []
    args = (kept, *command.args[1:])
    return [Command(command.operator, command.overload, args, command.kwargs, (output,))]


def _type_as(editor: Editor, command: Command) -> list[Command] | None:
    """The cast to the dtype of another value."""
    tensor = editor.tensor(command.args[1])
    if command.kwargs or tensor is None:
        return None
    return [Command("aten::to", "dtype", (command.args[0], tensor.dtype), {}, command.outputs)]


def _clone(editor: Editor, command: Command) -> list[Command] | None:
    output = command.outputs[0]
    if output is None or not _is_copy(editor, command.args[0], output):
        return None
    editor.alias(output, command.args[0].name)
    return []


def _is_copy(editor: Editor, source: Argument, output: str) -> bool:
    """Whether an output that is a copy of ``source`` can be ``source`` itself."""
    name, tensor = ref(source), editor.tensor(source)
    copied = editor.facts.tensors[output]
    if name is None or tensor is None or not editor.facts.is_computed(name):
        return False
    alike = (tensor.shape, tensor.stride(), tensor.dtype) == (
        copied.shape,
        copied.stride(),
        copied.dtype,
    )
    return alike and editor.is_stable(source, Ref(output))


def _numel(editor: Editor, argument: Argument) -> int:
    tensor: Tensor | None = editor.tensor(argument)
    return 1 if tensor is None else tensor.numel()


_FORMS: dict[str, Callable[[Editor, Command], list[Command] | None]] = {
    "aten::linear": _linear,
    "aten::mm": _product,
    "aten::matmul": _product,
    "aten::addmm": _addmm,
    "aten::layer_norm": _layer_norm,
    "aten::rms_norm": _rms_norm,
    "aten::embedding": _lookup(1),
    "aten::index_select": _lookup(2),
    "aten::type_as": _type_as,
    "aten::cat": _cat,
    "aten::clone": _clone,
}
