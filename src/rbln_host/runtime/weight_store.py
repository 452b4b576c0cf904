# SPDX-License-Identifier: Apache-2.0
"""The weights of an executable: each once, however many programs read it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from rbln_host.compiler.capture import Captured, memory_of
from rbln_host.compiler.graph import TensorSpec
from rbln_host.compiler.pack import Layout
from rbln_host.compiler.weights import Weight, packed_names


class WeightStore:
    """Weights by name. Those of an artifact are mapped files, others are packed in memory."""

    def __init__(self) -> None:
        self._weights: dict[str, Weight] = {}
        self._unpacked: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every weight."""
        return {name: weight.spec for name, weight in self._weights.items()}

    @property
    def packed_specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of the weights that are there packed."""
        return {n: weight.spec for n, weight in self._weights.items() if weight.packed is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are stored, each memory once."""
        tensors = [t for weight in self._weights.values() for t in weight.copies.values()]
        return sum({memory_of(tensor): tensor.nbytes for tensor in tensors}.values())

    def update(self, weights: Mapping[str, Weight]) -> None:
        """Take an artifact's weights, in place of what was there under the same names."""
        self._weights.update(weights)

    def add(self, items: Iterable[Captured]) -> None:
        """Take the weights of programs in memory, packed where a kernel reads them so.

        A weight that is there under its name stays, and gets the layout that it lacks.
        """
        items = list(items)
        packed = packed_names(items)
        for item in items:
            for name, tensor in item.weights.items():
                known = self._weights.get(name)
                if known is None:
                    self._weights[name] = Weight.of(tensor, packed=name in packed)
                elif name in packed and known.packed is None:
                    added = Weight.of(tensor, packed=True)
                    copies = {**known.copies, **added.copies}
                    self._weights[name] = replace(known, copies=copies)

    def plain(self, name: str) -> Tensor:
        """The row-major weight. One that is stored packed only is unpacked once and kept."""
        weight = self._weights[name]
        if Layout.PLAIN in weight.copies:
            return weight.plain()
        if name not in self._unpacked:
            self._unpacked[name] = weight.plain()
        return self._unpacked[name]

    def copy(self, name: str, layout: Layout) -> Tensor:
        """The weight in a layout: a packed one is there or not (KeyError), a plain one is made."""
        return self.plain(name) if layout is Layout.PLAIN else self._weights[name].copies[layout]
