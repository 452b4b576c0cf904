# SPDX-License-Identifier: Apache-2.0
"""Recording: a module runs once on tensors without data, and each operator it applies is noted.

Sizes are those of the given inputs, so what the module computes from sizes, or decides by them,
is done while it runs: only operators on tensors of fixed shape remain. What would need data
(``item``, ``nonzero``) raises. ``torch.export`` gives the same list of operators 10 times slower:
it makes proxies, guards and a second graph, none of which a static program needs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._export.utils import _compiling_state_context
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rbln_host.compiler.answers import Answers
from rbln_host.errors import CaptureError

_DATA_GETTER = Tensor.data.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Call:
    """One operator applied: an ``OpOverload``, what it was given and what it returned."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(frozen=True)
class Recording:
    """Fake inputs by name, the calls in order, and what the module returned.

    Tensors are told apart by identity: a call's argument is an input, a weight's fake, an earlier
    call's result, or a real tensor, which is a constant.
    """

    inputs: Mapping[str, Tensor]
    calls: tuple[Call, ...]
    result: Any


class Recorder:
    """Records runs of a module, or of functions that call it.

    ``weights`` are its parameters and buffers by every name they have; while it runs each is
    replaced by a fake, the same one for the same ``names[name]``, kept between runs.
    """

    def __init__(
        self, module: torch.nn.Module, weights: Mapping[str, Tensor], names: Mapping[str, str]
    ) -> None:
        self._module = module
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._answers = Answers(self._mode)
        self.fakes = {own: self._mode.from_tensor(weights[own]) for own in set(names.values())}
        """Fake of each weight, by the one name of ``names``."""
        self._fake_of = {id(weights[name]): self.fakes[own] for name, own in names.items()}

    def record(
        self, function: Callable[..., Any], inputs: Mapping[str, Tensor], name: str
    ) -> Recording:
        """Record ``function(**inputs)`` for the program ``name``; inputs' values do not matter.

        Raises CaptureError for a function that needs them, or fails.
        """
        noting = _Noting(name, self._answers)
        try:
            fakes = {key: self._mode.from_tensor(value) for key, value in inputs.items()}
            with self._fake_weights(), _static_trace(), self._mode, noting:
                result = function(**fakes)
        except CaptureError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"program {name}: the model cannot be captured: {error} depends on data; a "
                "program is a straight line of operators on tensors of fixed sizes, without "
                "control flow"
            ) from error
        except Exception as error:  # a model may raise anything
            raise CaptureError(
                f"program {name}: the model cannot be captured as a static program: {error}"
            ) from error
        return Recording(fakes, tuple(noting.calls), result)

    @contextmanager
    def _fake_weights(self) -> Iterator[None]:
        """Put fakes in place of the module's weights, table by table: layers share modules."""
        tables: list[dict[str, Any]] = []
        for module in self._module.modules():
            tables += (module._parameters, module._buffers)
        kept = [dict(table) for table in tables]
        for table in tables:
            table.update({name: self._fake_of.get(id(t), t) for name, t in table.items()})
        try:
            yield
        finally:
            for table, real in zip(tables, kept, strict=True):
                table.update(real)


class _Noting(TorchDispatchMode):
    """Notes every call of torch's dispatcher, as the fake mode below it answers."""

    supports_higher_order_operators = True

    def __init__(self, name: str, answers: Answers) -> None:
        super().__init__()
        self._name, self._answers = name, answers
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"program {self._name}: {func} is control flow or calls a graph of its own; a "
                "program is a straight line of operators on tensors of fixed sizes"
            )
        result = self._answers.call(func, args, kwargs or {})
        self.calls.append(Call(func, args, kwargs or {}, result))
        return result


@contextmanager
def _static_trace() -> Iterator[None]:
    """What models ask for before they do what cannot be traced, and see while they are.

    In inference mode composite operators (``linear``) arrive whole.
    """
    with torch.inference_mode(), _compiling_state_context(), _SeenData():
        yield


class _SeenData(TorchFunctionMode):
    """``tensor.data`` hides a tensor from the recorder; where nothing has gradients it is one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _DATA_GETTER:
            return args[0]
        return func(*args, **(kwargs or {}))
