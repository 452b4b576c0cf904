# SPDX-License-Identifier: Apache-2.0
"""Capture: ``torch.export`` of a module at fixed shapes, as a :class:`Graph` and its weights."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import blake3
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from rbln_host.compiler.aliases import written_values
from rbln_host.compiler.export import export_module
from rbln_host.compiler.graph import Argument, Captured, Command, Graph, Ref, TensorSpec
from rbln_host.compiler.operators import NAMESPACES, refusal
from rbln_host.compiler.passes import optimise
from rbln_host.compiler.serial import argument_to_json
from rbln_host.errors import CaptureError

__all__ = ["Captured", "canonical_names", "capture", "named_tensors", "read_program"]

# Checks, and a question about dtypes that was answered while the module was traced.
_DROPPED = frozenset(
    {
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::promote_types",
        "aten::sym_constrain_range_for_size",
    }
)
_SIZES = (int, torch.SymInt, torch.SymBool)
"""What a node gives that computes with sizes; none of it is left in a program."""


def capture(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    name: str,
    free_axes: Mapping[str, int] | None = None,
) -> Captured:
    """Capture ``module(**inputs)`` as the program ``name``.

    The module takes its inputs by keyword and returns a tensor or a tuple of tensors.
    ``free_axes`` names, per input, one axis whose size the program must not depend on.
    Raises CaptureError when the module cannot be exported, needs an operator or a constant that
    programs may not hold, or writes to its weights (programs share them).
    """
    exported = export_module(module, inputs, name)
    return read_program(exported, name, free_axes or {}, canonical_names(named_tensors(module)))


def read_program(
    exported: Any,
    name: str,
    free_axes: Mapping[str, int],
    canonical: Mapping[str, str],
    sizes: Mapping[Any, int] | None = None,
) -> Captured:
    """An exported module as the program ``name``, with ``sizes`` in place of its symbols."""
    reader = _GraphReader(exported, name, free_axes, canonical, sizes or {})
    graph = optimise(reader.graph())
    _check_weights_are_read_only(graph)
    read = set(graph.weights.values())
    return Captured(graph, {n: t for n, t in reader.weights.items() if n in read})


def named_tensors(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by every name they have."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def canonical_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Every name -> the least name of the same memory.

    Tied weights and shared buffers have several names and the exporter picks any of them; one
    name for each makes the artifact hold them once and stay stable between compiles.
    """
    pairs = list(named)
    least: dict[Any, str] = {}
    for name, tensor in pairs:
        key = memory_of(tensor)
        least[key] = min(name, least.get(key, name))
    return {name: least[memory_of(tensor)] for name, tensor in pairs}


def memory_of(tensor: Tensor) -> Any:
    """Equal for two tensors that are the same elements of the same memory."""
    pointer = tensor.untyped_storage().data_ptr()
    return (pointer, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _check_weights_are_read_only(graph: Graph) -> None:
    written = sorted(written_values(graph, surely=True).intersection(graph.weights))
    if written:
        raise CaptureError(
            f"program {graph.name}: it writes to the weight {graph.weights[written[0]]!r}; "
            "a state that changes must be an input"
        )


class _GraphReader:
    """Reads one exported program into the program form."""

    def __init__(
        self,
        exported: Any,
        name: str,
        free_axes: Mapping[str, int],
        canonical: Mapping[str, str],
        sizes: Mapping[Any, int],
    ) -> None:
        self.exported, self.name, self.free_axes = exported, name, free_axes
        self.canonical, self.sizes = canonical, sizes
        self.weights: dict[str, Tensor] = {}
        self._value_weights: dict[str, str] = {}
        self._inputs: dict[str, TensorSpec] = {}
        self._keywords: dict[str, str] = {}
        """The exporter's name of an input -> its own."""
        self._commands: list[Command] = []

    def graph(self) -> Graph:
        self._read_placeholders()
        outputs: tuple[str, ...] = ()
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = self._read_outputs(node.args[0])
        return Graph(self.name, self._inputs, self._value_weights, tuple(self._commands), outputs)

    def _read_placeholders(self) -> None:
        nodes = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        # The exporter changes the names of inputs (to lower case, for one) but not their order.
        keywords = iter(self.exported.call_spec.in_spec.child(1).context)
        for spec in self.exported.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind == InputKind.USER_INPUT:
                keyword = next(keywords)
                self._inputs[keyword] = self._input_spec(keyword, node.meta["val"])
                self._keywords[node.name] = keyword
            else:
                self._bind_weight(node.name, spec)

    def _read_outputs(self, nodes: Iterable[Any]) -> tuple[str, ...]:
        for node in nodes:
            if not isinstance(node, torch.fx.Node):
                raise CaptureError(f"program {self.name}: it returns {node!r}, not only tensors")
        return tuple(self._value(node) for node in nodes)

    def _value(self, node: Any) -> str:
        """The name of a node's value in the program."""
        name: str = node.name
        return self._keywords.get(name, name)

    def _input_spec(self, name: str, fake: Tensor) -> TensorSpec:
        shape = list(fake.shape)
        if name in self.free_axes:
            shape[self.free_axes[name]] = -1
        return TensorSpec(tuple(self._concrete(axis) for axis in shape), fake.dtype)

    def _concrete(self, size: Any) -> int:
        """A size of the exported program at the sizes that were asked for."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        value = size.node.expr.subs(self.sizes)
        if not value.is_number:
            raise CaptureError(
                f"program {self.name}: the size {value} depends on data; a program is a straight "
                "line of operators on tensors of fixed sizes"
            )
        return int(value)

    def _bind_weight(self, value: str, spec: Any) -> None:
        tensor = self.exported.state_dict.get(spec.target)
        if tensor is None:
            tensor = self.exported.constants.get(spec.target)
        if not isinstance(tensor, Tensor):
            raise CaptureError(f"program {self.name}: it reads {spec.target!r}, not a tensor")
        if spec.kind == InputKind.CONSTANT_TENSOR:
            weight = f"constant.{_digest(tensor)}"
        else:
            weight = self.canonical.get(spec.target, spec.target)
        self._value_weights[value] = weight
        self.weights[weight] = tensor.detach()

    def _read_call(self, node: Any) -> None:
        if node.target is operator.getitem or isinstance(node.meta.get("val"), _SIZES):
            return
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            raise CaptureError(
                f"program {self.name}: {node.target} is control flow or a size that is not fixed; "
                "a program is a straight line of operators on tensors of fixed shape"
            )
        if schema.name in _DROPPED:
            return
        if _is_noop_cast(node):
            source = Ref(self._value(node.args[0]))
            self._commands.append(Command("aten::alias", "default", (source,), {}, (node.name,)))
            return
        self._check_allowed(node)
        self._check_fixed_sizes(node.meta.get("val"))
        outputs, is_tuple = _outputs(node)
        self._commands.append(
            Command(
                operator=schema.name,
                overload=schema.overload_name or "default",
                args=tuple(self._argument(a) for a in node.args),
                kwargs={key: self._argument(a) for key, a in node.kwargs.items()},
                outputs=outputs,
                returns_tuple=is_tuple,
            )
        )

    def _argument(self, argument: Any) -> Argument:
        if isinstance(argument, torch.fx.Node):
            value = argument.meta.get("val")
            return (
                self._concrete(value) if isinstance(value, _SIZES) else Ref(self._value(argument))
            )
        if isinstance(argument, list | tuple):
            return tuple(self._argument(item) for item in argument)
        if isinstance(argument, torch.device) and argument.type == "cpu":
            return torch.device("cpu")
        try:
            argument_to_json(argument)
        except ValueError as error:
            raise CaptureError(f"program {self.name}: {error}") from error
        return argument

    def _check_fixed_sizes(self, value: Any) -> None:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            for size in tensor.shape if isinstance(tensor, Tensor) else ():
                self._concrete(size)

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


def _digest(tensor: Tensor) -> str:
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return blake3.blake3(header + raw).hexdigest()[:16]
