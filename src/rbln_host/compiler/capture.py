# SPDX-License-Identifier: Apache-2.0
"""Capture: a module run at fixed shapes, as a :class:`Graph` and its weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import blake3
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rbln_host.compiler.adapters import Adapters
from rbln_host.compiler.aliases import written_values
from rbln_host.compiler.graph import (
    Argument,
    Captured,
    Command,
    Graph,
    Ref,
    TensorSpec,
)
from rbln_host.compiler.operators import NAMESPACES, refusal
from rbln_host.compiler.passes import optimise
from rbln_host.compiler.record import Call, Recorder, Recording
from rbln_host.compiler.serial import argument_to_json
from rbln_host.errors import CaptureError

__all__ = ["Captured", "Capturer", "canonical_names", "capture", "memory_of", "named_tensors"]


class Capturer:
    """Captures programs that compute with the weights of one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        named = dict(named_tensors(module))
        self._names = canonical_names(named.items())
        self._recorder = Recorder(module, named, self._names)
        real = {own: named[own].detach() for own in self._recorder.fakes}
        self._weights = _ModuleWeights(real, self._recorder.fakes)

    def capture(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Tensor],
        name: str,
        free_axes: Mapping[str, int] | None = None,
        adapters: Adapters | None = None,
    ) -> Captured:
        """Capture ``function(**inputs)``, the module or what calls it, as the program ``name``.

        It takes its inputs by keyword and returns a tensor or a tuple of tensors.
        ``free_axes`` names, per input, one axis whose size the program must not depend on.
        ``adapters`` become further inputs of the program; its first input is of its tokens.
        Raises CaptureError when it cannot be run without data, needs an operator or a constant
        that programs may not hold, or writes to weights (programs share them).
        """
        reader = _Reader(name, self._weights)
        graph = optimise(
            reader.graph(self._recorder.record(function, inputs, name), free_axes or {})
        )
        _check_weights_are_read_only(graph)
        read = set(graph.weights.values())
        weights = {n: t for n, t in reader.weights.items() if n in read}
        return Captured(graph, weights, adapters and adapters.renamed(self._names))


def capture(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    name: str,
    free_axes: Mapping[str, int] | None = None,
) -> Captured:
    """One program of a module, as :meth:`Capturer.capture`."""
    return Capturer(module).capture(module, inputs, name, free_axes)


def named_tensors(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by every name they have."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def canonical_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Every name -> the least name of the same memory.

    Tied weights and shared buffers have several names and a model reads any of them; one
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


class _ModuleWeights:
    """The weights of a module by name, and which of them a tensor of a recording is."""

    def __init__(self, real: Mapping[str, Tensor], fakes: Mapping[str, Tensor]) -> None:
        self.real = real
        self._of_fake = {id(fake): name for name, fake in fakes.items()}
        self._of_memory = {memory_of(tensor): name for name, tensor in real.items()}

    def name_of(self, tensor: Tensor) -> str | None:
        """None for a tensor that is no weight. One that a layer also keeps unregistered is."""
        if isinstance(tensor, FakeTensor):
            return self._of_fake.get(id(tensor))
        return self._of_memory.get(memory_of(tensor))


class _Reader:
    """Reads a recording into the program form."""

    def __init__(self, name: str, module_weights: "_ModuleWeights") -> None:
        self._name, self._module_weights = name, module_weights
        self.weights: dict[str, Tensor] = {}
        self._weight_values: dict[str, str] = {}
        """Weight name -> the value it is in the program."""
        self._values: dict[int, str] = {}
        """``id`` of a tensor of the recording, which keeps it alive, -> its value."""
        self._taken: dict[str, int] = {}

    def graph(self, recording: Recording, free_axes: Mapping[str, int]) -> Graph:
        inputs = {}
        for name, fake in recording.inputs.items():
            inputs[self._define(fake, name)] = _spec(fake, free_axes.get(name))
        commands = [self._command(call) for call in recording.calls if _computes(call)]
        outputs = tuple(self._outputs(recording.result))
        values = {value: weight for weight, value in self._weight_values.items()}
        return Graph(self._name, inputs, values, _without_unread(commands, outputs), outputs)

    def _command(self, call: Call) -> Command:
        self._check_allowed(call.function)
        schema = call.function._schema
        operator = schema.name
        if operator == "aten::lift_fresh":
            # A tensor that the module makes anew in every run; the constant stays as it is.
            operator = "aten::lift_fresh_copy"
        return Command(
            operator=operator,
            overload=schema.overload_name or "default",
            args=tuple(self._argument(a) for a in call.args),
            kwargs={key: self._argument(a) for key, a in call.kwargs.items()},
            outputs=tuple(
                self._define(tensor, operator.partition("::")[2]) if _is_tensor(tensor) else None
                for tensor in _results(call)
            ),
            returns_tuple=isinstance(call.result, list | tuple),
        )

    def _define(self, tensor: Tensor, wanted: str) -> str:
        """Give a tensor a name of its own, ``wanted`` if it is free."""
        count = self._taken.get(wanted, 0)
        self._taken[wanted] = count + 1
        if count:
            return self._define(tensor, f"{wanted}_{count}")
        self._values[id(tensor)] = wanted
        return wanted

    def _argument(self, argument: Any) -> Argument:
        if isinstance(argument, Tensor):
            return Ref(self._value(argument))
        if isinstance(argument, list | tuple):
            return tuple(self._argument(item) for item in argument)
        if isinstance(argument, torch.device) and argument.type == "cpu":
            return torch.device("cpu")
        try:
            argument_to_json(argument)
        except ValueError as error:
            raise CaptureError(f"program {self._name}: {error}") from error
        return argument

    def _value(self, tensor: Tensor) -> str:
        value = self._values.get(id(tensor))
        if value is None:
            value = self._values[id(tensor)] = self._weight_value(tensor)
        return value

    def _weight_value(self, tensor: Tensor) -> str:
        """The value of a tensor that no command made."""
        weight, real = self._weight(tensor)
        if weight not in self._weight_values:
            self.weights[weight] = real
            self._weight_values[weight] = self._define(tensor, weight)
        return self._weight_values[weight]

    def _weight(self, tensor: Tensor) -> tuple[str, Tensor]:
        """A weight of the module, or a constant, which is called by its content."""
        own = self._module_weights.name_of(tensor)
        if own is not None:
            return own, self._module_weights.real[own]
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"program {self._name}: it reads a tensor kept from an earlier capture; a state "
                "that changes must be an input"
            )
        return f"constant.{_digest(tensor)}", tensor.detach()

    def _outputs(self, result: Any) -> Iterator[str]:
        for item in result if isinstance(result, list | tuple) else (result,):
            if not isinstance(item, Tensor):
                raise CaptureError(f"program {self._name}: it returns {item!r}, not only tensors")
            yield self._value(item)

    def _check_allowed(self, function: Any) -> None:
        namespace = function._schema.name.partition("::")[0]
        if namespace not in NAMESPACES:
            raise CaptureError(
                f"program {self._name}: operator {function} is not of {NAMESPACES}; "
                "the layer that calls it needs a replacement"
            )
        reason = refusal(function)
        if reason:
            raise CaptureError(f"program {self._name}: operator {function}: {reason}")


def _computes(call: Call) -> bool:
    """Whether a call is work to do when the program runs.

    A question about sizes or dtypes is answered by now, and so is a cast to a tensor's own dtype.
    """
    schema = call.function._schema
    if schema.name == "aten::to" and call.result is call.args[0]:
        return False
    return schema.is_mutable or any(map(_is_tensor, _results(call)))


def _results(call: Call) -> Sequence[Any]:
    if call.result is None:
        return ()
    return call.result if isinstance(call.result, list | tuple) else (call.result,)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _spec(fake: Tensor, free_axis: int | None) -> TensorSpec:
    shape = list(fake.shape)
    if free_axis is not None:
        shape[free_axis] = -1
    return TensorSpec(tuple(shape), fake.dtype)


def _without_unread(commands: Iterable[Command], outputs: Iterable[str]) -> tuple[Command, ...]:
    """The commands with None for each member of a tuple that nobody reads."""
    commands = list(commands)
    read = {*outputs, *(name for command in commands for name in command.inputs())}
    return tuple(
        replace(c, outputs=tuple(name if name in read else None for name in c.outputs))
        if c.returns_tuple
        else c
        for c in commands
    )


def _digest(tensor: Tensor) -> str:
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return blake3.blake3(header + raw).hexdigest()[:16]
