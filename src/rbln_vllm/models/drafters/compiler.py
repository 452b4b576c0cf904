# SPDX-License-Identifier: Apache-2.0
"""Compiles a drafter: a program that fills its KV from a prompt, and one that drafts K tokens.

All K passes are in one program, with the choice of each token between them, so a step of the
engine runs one program for the drafter and waits for nothing in between.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.models.drafters.network import DraftNetwork, MedusaNetwork
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.models.program_inputs import forward_inputs, free_axes
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import Captured, Toolchain

TARGET, LAST_ROWS = "target_hidden", "last_rows"
LATER_POSITIONS, LATER_SLOTS = "later_positions", "later_slots"
LATER_QUERY_POS = "later_query_pos"
"""Inputs of draft programs beside those of forward programs."""


class DraftCompiler(Protocol):
    """Compiles the programs of a drafter."""

    kv_layers: tuple[KVLayer, ...]

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """One by one; CaptureError says why a drafter cannot be."""
        ...


class NetworkCompiler:
    """The programs of a drafter that goes from token to token.

    ``first_layer`` is the number of its first layer in the pool, ``num_drafts`` K.
    """

    def __init__(
        self, network: DraftNetwork, geometry: Geometry, num_drafts: int, first_layer: int
    ) -> None:
        self._network, self._geometry = network, geometry
        self._num_drafts, self._first_layer = num_drafts, first_layer
        self.kv_layers = network.kv_layers

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """One by one; CaptureError says why a drafter cannot be."""
        compiler = toolchain.compiler(named_apart(self._network.module))
        axes = free_axes(self.kv_layers, self._first_layer)
        for key in keys:
            function = self._fill if key.role is Role.DRAFT_PREFILL else self._draft
            with self._network.capturing():
                captured = compiler.capture(function, self._inputs(key), key.name, axes)
            yield captured

    def _fill(self, *, target_hidden: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Write the drafter's KV of ``N`` tokens. What is computed beyond it is not read."""
        self._network.forward(inputs, self._combined(target_hidden))
        return inputs["slots"].clone()

    def _draft(
        self,
        *,
        last_rows: Tensor,
        target_hidden: Tensor | None = None,
        later_positions: Tensor | None = None,
        later_slots: Tensor | None = None,
        later_query_pos: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """The next K tokens of each of B sequences, ``[B, K]``.

        The first pass takes up to Q new tokens of each; ``last_rows [B]`` says where in N each
        one's last is. Pass ``k`` takes its input from pass ``k - 1`` and its place from row ``k``
        of ``later_positions``, ``later_slots`` and ``later_query_pos``, all ``[K - 1, B]``.
        """
        states = self._network.forward(inputs, self._combined(target_hidden))
        states = tuple(state_NH.index_select(0, last_rows) for state_NH in states)
        drafts = [self._network.tokens(states[0])]
        for later in range(self._num_drafts - 1):
            assert later_positions is not None
            assert later_slots is not None
            assert later_query_pos is not None
            place = {
                "input_ids": drafts[-1],
                "positions": later_positions[later],
                "slots": later_slots[later],
                "query_pos": later_query_pos[later],
            }
            states = self._network.forward({**inputs, **place}, self._carried(states))
            drafts.append(self._network.tokens(states[0]))
        return torch.stack(drafts, dim=1)

    def _combined(self, target_NW: Tensor | None) -> Tensor | None:
        return None if target_NW is None else self._network.combined(target_NW)

    def _carried(self, states: tuple[Tensor, ...]) -> Tensor | None:
        return states[-1] if self._network.target_width else None

    def _inputs(self, key: ProgramKey) -> dict[str, Tensor]:
        inputs = forward_inputs(key, self._geometry, self.kv_layers, self._first_layer)
        width = self._network.target_width
        if width:
            inputs[TARGET] = torch.zeros(key.num_tokens, width, dtype=self._network.dtype)
        if key.role is Role.DRAFT:
            inputs.update(later_inputs(key.batch, self._num_drafts))
        return inputs


class HeadsCompiler:
    """The programs of Medusa's heads: one for each number of rows."""

    kv_layers: tuple[KVLayer, ...] = ()

    def __init__(self, network: MedusaNetwork, num_drafts: int) -> None:
        self._network, self._num_drafts = network, num_drafts

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """One by one; CaptureError says why a drafter cannot be."""
        compiler = toolchain.compiler(named_apart(self._network.module))
        for key in keys:
            states = torch.zeros(key.batch, self._network.target_width, dtype=self._network.dtype)
            with self._network.capturing():
                captured = compiler.capture(self._draft, {TARGET: states}, key.name)
            yield captured

    def _draft(self, *, target_hidden: Tensor) -> Tensor:
        drafts_BK: Tensor = self._network.drafts(target_hidden)[:, : self._num_drafts]
        return drafts_BK.contiguous()


def later_inputs(batch: int, num_drafts: int) -> dict[str, Tensor]:
    """Where each row's first pass ends, and the places of the passes after it."""
    inputs = {LAST_ROWS: torch.zeros(batch, dtype=torch.int64)}
    if num_drafts > 1:
        shape = (num_drafts - 1, batch)
        inputs[LATER_POSITIONS] = torch.zeros(shape, dtype=torch.int64)
        inputs[LATER_SLOTS] = torch.zeros(shape, dtype=torch.int64)
        inputs[LATER_QUERY_POS] = torch.zeros(shape, dtype=torch.int32)
    return inputs


def named_apart(module: torch.nn.Module) -> torch.nn.Module:
    """The drafter's weights under names that no weight of the target has."""
    return torch.nn.ModuleDict({"drafter": module})
