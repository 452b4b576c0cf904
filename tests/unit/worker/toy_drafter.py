# SPDX-License-Identifier: Apache-2.0
"""A drafter of one attention layer: as programs, and as a plain loop over a sequence's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import embedding, linear

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)
from rbln_vllm.models.drafters.compiler import NetworkCompiler
from rbln_vllm.models.kv_layers import KVLayer, kv_input_name
from rbln_vllm.programs import ProgramKey, ProgramTable
from rbln_vllm.toolchain import Executable, host_toolchain

HEADS, SIZE, VOCAB, POSITIONS = 2, 32, 61, 64
HIDDEN = HEADS * SIZE
SCALE = SIZE**-0.5
FIRST_LAYER = 3
"""The number of its layer in the pool; those before are the target's."""


class Weights(torch.nn.Module):
    """``reads_states`` makes it a drafter that reads a state of the target beside each token."""

    def __init__(self, *, reads_states: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> Parameter:
            return Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5, False)

        self.tokens_VH, self.positions_PH = random(VOCAB, HIDDEN), random(POSITIONS, HIDDEN)
        self.query_HH, self.key_HH = random(HIDDEN, HIDDEN), random(HIDDEN, HIDDEN)
        self.value_HH, self.out_HH = random(HIDDEN, HIDDEN), random(HIDDEN, HIDDEN)
        self.head_VH = random(VOCAB, HIDDEN)
        self.joined_H2H = random(HIDDEN, 2 * HIDDEN) if reads_states else None

    def embed(self, tokens_N: Tensor, positions_N: Tensor, carried_NH: Tensor | None) -> Tensor:
        x_NH = embedding(tokens_N, self.tokens_VH)
        if carried_NH is not None:
            assert self.joined_H2H is not None
            x_NH = linear(torch.cat((x_NH, carried_NH), dim=-1), self.joined_H2H)
        return x_NH + embedding(positions_N, self.positions_PH)

    def heads(self, x_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            linear(x_NH, weight).view(-1, HEADS, SIZE)
            for weight in (self.query_HH, self.key_HH, self.value_HH)
        )
        return query, key, value


class ToyNetwork:
    """The drafter as its programs are captured from it."""

    kv_layers: tuple[KVLayer, ...] = (KVLayer("toy", HEADS, HEADS, SIZE, "float32", 0),)
    dtype = torch.float32

    def __init__(self, *, reads_states: bool) -> None:
        self.module = self.weights = Weights(reads_states=reads_states)
        self.target_width = HIDDEN if reads_states else 0

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def combined(self, target_NW: Tensor) -> Tensor:
        return target_NW * 2

    def forward(self, inputs: dict[str, Tensor], carried_NH: Tensor | None) -> tuple[Tensor, ...]:
        x_NH = self.weights.embed(inputs["input_ids"], inputs["positions"], carried_NH)
        query, key, value = self.weights.heads(x_NH)
        pool = inputs[kv_input_name(FIRST_LAYER)]
        torch.ops.rbln.write_kv(key, value, pool, inputs["slots"])
        attended = torch.ops.rbln.paged_attention(
            query, pool, inputs["block_table"], inputs["query_pos"], SCALE, 0, 0.0, None, None
        )
        return (x_NH + linear(attended.reshape(-1, HIDDEN), self.weights.out_HH),)

    def tokens(self, states_BH: Tensor) -> Tensor:
        return linear(states_BH, self.weights.head_VH).argmax(dim=-1)


class PlainDrafter:
    """The same by definition: token after token, every key and value kept in a list."""

    def __init__(self, network: ToyNetwork, state_of: Callable[[int, int], Tensor]) -> None:
        self._network, self._state_of = network, state_of

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """What follows ``tokens``. ``state_of(position, token)`` is the target's state."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        reads_states = bool(self._network.target_width)
        state = torch.empty(0)
        if reads_states:
            for position, token in enumerate(tokens[1:]):
                target = self._network.combined(self._state_of(position, tokens[position]))
                state = self._pass(token, position, target)
        else:
            for position, token in enumerate(tokens):
                state = self._pass(token, position, None)
        drafts = [int(self._network.tokens(state))]
        first = len(tokens) - reads_states
        for position in range(first, first + count - 1):
            state = self._pass(drafts[-1], position, state if reads_states else None)
            drafts.append(int(self._network.tokens(state)))
        return drafts

    def _pass(self, token: int, position: int, carried_1H: Tensor | None) -> Tensor:
        weights = self._network.weights
        x_1H = weights.embed(torch.tensor([token]), torch.tensor([position]), carried_1H)
        query, key, value = weights.heads(x_1H)
        self._keys.append(key)
        self._values.append(value)
        scores_HL = torch.einsum("nhd,lhd->hl", query, torch.cat(self._keys)) * SCALE
        attended = torch.einsum("hl,lhd->hd", scores_HL.softmax(-1), torch.cat(self._values))
        return x_1H + linear(attended.reshape(1, HIDDEN), weights.out_HH)


class ToyStore:
    """A store whose only programs are the drafter's."""

    def __init__(self, network: ToyNetwork, table: ProgramTable, num_drafts: int) -> None:
        self.executable: Executable = host_toolchain().new_executable()
        self.kv_layers = (network.kv_layers[0],) * (FIRST_LAYER + 1)
        self.used: list[str] = []
        geometry: Any = SimpleNamespace(
            block_size=table.block_size, num_blocks_per_seq=table.num_blocks_per_seq
        )
        compiler = NetworkCompiler(network, geometry, num_drafts, FIRST_LAYER)
        self.executable.add(*compiler.compile(table.drafts, host_toolchain()))

    def bind_pool(self, num_blocks: int, block_size: int) -> None:
        """A pool full of what no drafter may read."""
        pool = torch.full((num_blocks, HEADS, block_size, 2 * SIZE), 1e3)
        self.executable.bind_kv({kv_input_name(FIRST_LAYER): pool})

    def ensure(self, key: ProgramKey) -> None:
        self.used.append(key.name)
