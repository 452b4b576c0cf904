# SPDX-License-Identifier: Apache-2.0
"""Embeddings in place of tokens reach the program's rows, and only those."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rbln_vllm.programs import ProgramKey, ProgramTable, Role
from rbln_vllm.toolchain import TensorSpec
from rbln_vllm.worker.embed_programs import EmbedPrograms
from rbln_vllm.worker.embeddings import GivenEmbeds, given_embeds
from rbln_vllm.worker.inputs import PADDING_TOKEN, StagedInputs, StepInputs

WIDTH = 3
TABLE = ProgramTable(8, (2,), block_size=4, num_blocks_per_seq=4, takes_embeds=True)


class Executable:
    """The embedding of a token is its id, three times."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def run(self, name: str, inputs: Mapping[str, Tensor], tokens: int) -> tuple[Tensor, ...]:
        self.names.append(name)
        ids_N = inputs["input_ids"]
        assert ids_N[tokens:].eq(PADDING_TOKEN).all()
        return (ids_N[:, None].float().expand(-1, WIDTH).clone(),)


class Store:
    def __init__(self) -> None:
        self.executable: Any = Executable()

    def ensure(self, key: ProgramKey) -> None:
        assert key in TABLE.programs


def step(ids: list[int], embeds: GivenEmbeds | None = None) -> StepInputs:
    ids_N = np.array(ids, np.int64)
    blocks_BT = np.ones((1, 4), np.int64)
    return StepInputs(ids_N, ids_N, ids_N, np.array([len(ids)]), blocks_BT, None, embeds)


@pytest.mark.parametrize(
    ("count", "name"), [(1, "embed_b2_q1"), (2, "embed_b2_q1"), (3, "embed_b8_q1")]
)
def test_tokens_are_looked_up(count: int, name: str) -> None:
    store = Store()
    programs = EmbedPrograms(TABLE, store)
    programs.look_up(np.full(8, 9))
    found_NE = programs.of(step([5] * count))
    assert found_NE.tolist() == [[5.0] * WIDTH] * count
    assert store.executable.names[-1] == name


def test_what_is_given_is_taken() -> None:
    given = GivenEmbeds(np.array([0, 2]), torch.full((2, WIDTH), -1.0, dtype=torch.float64))
    found_NE = EmbedPrograms(TABLE, Store()).of(step([5, 6, 7], given))
    assert found_NE[:, 0].tolist() == [-1.0, 6.0, -1.0]
    with pytest.raises(ValueError, match="1 embeddings are given for 2 tokens"):
        GivenEmbeds(np.array([0, 1]), torch.zeros(1, WIDTH))


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_padding_is_nothing(count: int) -> None:
    spec = TensorSpec((8, WIDTH), torch.float32)
    staged = StagedInputs(ProgramKey(Role.PREFILL, 1, 8), 4, spec)
    staged.tensors["inputs_embeds"].fill_(1e9)
    staged.stage_embeds(step([4] * count), torch.full((count, WIDTH), 2.0))
    buffer_NE = staged.tensors["inputs_embeds"]
    assert buffer_NE[:count].eq(2.0).all()
    assert buffer_NE[count:].eq(0.0).all()


def test_rows_of_unequal_length_have_padding_between() -> None:
    spec = TensorSpec((6, WIDTH), torch.float32)
    staged = StagedInputs(ProgramKey(Role.DECODE, 2, 3), 4, spec)
    ids_N = np.arange(3)
    two_rows = StepInputs(ids_N, ids_N, ids_N, np.array([1, 2]), np.ones((2, 4), np.int64))
    staged.stage_embeds(two_rows, torch.ones(3, WIDTH))
    assert staged.tensors["inputs_embeds"][:, 0].tolist() == [1, 0, 0, 1, 1, 0]


def batch(embeds: dict[int, Tensor]) -> Any:
    """Two sequences of eight places; what was given as embeddings is no token."""
    is_token = np.ones((2, 8), bool)
    for row, given in embeds.items():
        is_token[row, : len(given)] = False
    return SimpleNamespace(req_prompt_embeds=embeds, is_token_ids=is_token)


def test_a_batch_says_which_tokens_are_embeddings() -> None:
    rows_N, positions_N = np.array([0, 1, 1, 1]), np.array([3, 1, 2, 3])
    assert given_embeds(batch({}), rows_N, positions_N) is None
    given = torch.arange(3.0)[:, None].expand(3, WIDTH)
    found = given_embeds(batch({1: given}), rows_N, positions_N)
    assert found is not None
    assert found.places_K.tolist() == [1, 2]
    assert found.embeds_KE[:, 0].tolist() == [1.0, 2.0]
    assert given_embeds(batch({1: given}), np.array([0, 1]), np.array([0, 3])) is None
