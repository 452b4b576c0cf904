# SPDX-License-Identifier: Apache-2.0
"""Capture: ``torch.export`` of a module at fixed shapes, as a :class:`Graph` and its weights."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import blake3
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from rbln_host.compiler.graph import Argument, Command, Graph, Ref, TensorSpec
from rbln_host.compiler.operators import NAMESPACES, refusal
from rbln_host.compiler.passes import optimise
from rbln_host.errors import CaptureError

_DROPPED = frozenset({"aten::_assert_tensor_metadata", "aten::sym_constrain_range_for_size"})


@dataclass(frozen=True)
class Captured:
    """A program and the weights it reads, by the names the artifact will use."""

    graph: Graph
    weights: Mapping[str, Tensor]


def capture(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    name: str,
    free_axes: Mapping[str, int] | None = None,
) -> Captured:
    """Capture ``module(**inputs)`` as the program ``name``.

    The module takes its inputs by keyword and returns a tensor or a tuple of tensors.
    ``free_axes`` names, per input, one axis whose size the program must not depend on.
    Raises CaptureError when the module cannot be exported or needs an operator that programs
    may not hold.
    """
    exported = _export(module, inputs, name)
    reader = _GraphReader(exported, name, free_axes or {}, _canonical_names(module))
    graph = optimise(reader.graph())
    read = set(graph.weights.values())
    return Captured(graph, {n: t for n, t in reader.weights.items() if n in read})


def _canonical_names(module: torch.nn.Module) -> dict[str, str]:
    """Every parameter and buffer name -> the least name of the same memory.

    Tied weights and shared buffers have several names and the exporter picks any of them; one
    name for each makes the artifact hold them once and stay stable between compiles.
    """
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    least: dict[Any, str] = {}
    for name, tensor in named:
        key = _memory(tensor)
        least[key] = min(name, least.get(key, name))
    return {name: least[_memory(tensor)] for name, tensor in named}


def _memory(tensor: Tensor) -> Any:
    pointer = tensor.untyped_storage().data_ptr()
    return (pointer, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _export(module: torch.nn.Module, inputs: Mapping[str, Tensor], name: str) -> Any:
    try:
        with _traceable_data(), torch.no_grad():
            return torch.export.export(module, (), dict(inputs), strict=False)
    except Exception as error:  # torch.export raises nearly every type there is
        raise CaptureError(
            f"program {name}: the model cannot be captured as a static program: {error}"
        ) from error


@contextmanager
def _traceable_data() -> Iterator[None]:
    """``tensor.data`` hides a tensor from the tracer; read it as ``tensor.detach()`` instead."""
    data_getter = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    class DetachData(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if func == data_getter:
                return args[0].detach()
            return func(*args, **(kwargs or {}))

    with DetachData():
        yield


class _GraphReader:
    """Reads one exported program into the program form."""

    def __init__(
        self,
        exported: Any,
        name: str,
        free_axes: Mapping[str, int],
        canonical: Mapping[str, str],
    ) -> None:
        self.exported, self.name, self.free_axes = exported, name, free_axes
        self.canonical = canonical
        self.weights: dict[str, Tensor] = {}
        self._value_weights: dict[str, str] = {}
        self._inputs: dict[str, TensorSpec] = {}
        self._commands: list[Command] = []

    def graph(self) -> Graph:
        self._read_placeholders()
        outputs: tuple[str, ...] = ()
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = tuple(item.name for item in node.args[0])
        return Graph(
            self.name, self._inputs, self._value_weights, tuple(self._commands), outputs
        )

    def _read_placeholders(self) -> None:
        nodes = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        for spec in self.exported.graph_signature.input_specs:
            value = spec.arg.name
            if spec.kind == InputKind.USER_INPUT:
                self._inputs[value] = self._input_spec(value, nodes[value].meta["val"])
            else:
                self._bind_weight(value, spec)

    def _input_spec(self, name: str, fake: Tensor) -> TensorSpec:
        shape = list(fake.shape)
        if name in self.free_axes:
            shape[self.free_axes[name]] = -1
        return TensorSpec(tuple(int(axis) for axis in shape), fake.dtype)

    def _bind_weight(self, value: str, spec: Any) -> None:
        tensor = self.exported.state_dict.get(spec.target)
        if tensor is None:
            tensor = self.exported.constants[spec.target]
        if spec.kind == InputKind.CONSTANT_TENSOR:
            weight = f"constant.{_digest(tensor)}"
        else:
            weight = self.canonical.get(spec.target, spec.target)
        self._value_weights[value] = weight
        self.weights[weight] = tensor.detach()

    def _read_call(self, node: Any) -> None:
        if node.target is operator.getitem:
            return
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            raise CaptureError(
                f"program {self.name}: {node.target} computes with sizes that are not fixed"
            )
        if schema.name in _DROPPED:
            return
        if _is_noop_cast(node):
            self._commands.append(_alias(node))
            return
        self._check_allowed(node)
        outputs, is_tuple = _outputs(node)
        self._commands.append(
            Command(
                operator=schema.name,
                overload=schema.overload_name or "default",
                args=tuple(_argument(a) for a in node.args),
                kwargs={key: _argument(a) for key, a in node.kwargs.items()},
                outputs=outputs,
                returns_tuple=is_tuple,
            )
        )

    def _check_allowed(self, node: Any) -> None:
        namespace = node.target._schema.name.partition("::")[0]
        if namespace not in NAMESPACES:
            raise CaptureError(
                f"program {self.name}: operator {node.target} is not of {NAMESPACES}; "
                "the layer that calls it needs a replacement"
            )
        reason = refusal(node.target)
        if reason:
            raise CaptureError(f"program {self.name}: operator {node.target}: {reason}")


def _is_noop_cast(node: Any) -> bool:
    """``x.to(dtype)`` of a value that already has this dtype."""
    if node.target is not torch.ops.aten.to.dtype:
        return False
    plain = len(node.args) == 2 and not node.kwargs
    return plain and node.args[0].meta["val"].dtype == node.args[1]


def _alias(node: Any) -> Command:
    return Command("aten::alias", "default", (Ref(node.args[0].name),), {}, (node.name,))


def _outputs(node: Any) -> tuple[tuple[str | None, ...], bool]:
    """Output names of a call; those of a tuple come from the ``getitem`` nodes that read it."""
    value = node.meta.get("val")
    if value is None:
        return (), False
    if isinstance(value, (tuple, list)):
        names: list[str | None] = [None] * len(value)
        for user in node.users:
            index = user.args[1]
            if names[index] is None:
                names[index] = user.name
            else:
                user.replace_all_uses_with(next(u for u in node.users if u.name == names[index]))
        return tuple(names), True
    return (node.name,), False


def _argument(argument: Any) -> Argument:
    if isinstance(argument, torch.fx.Node):
        return Ref(argument.name)
    if isinstance(argument, (list, tuple)):
        return tuple(_argument(item) for item in argument)
    return argument


def _digest(tensor: Tensor) -> str:
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return blake3.blake3(header + raw).hexdigest()[:16]
