# SPDX-License-Identifier: Apache-2.0
"""Which logits programs run: those whose logits somebody reads."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.programs import ProgramKey, ProgramTable
from rbln_vllm.worker.embed_programs import Programs
from rbln_vllm.worker.program_model import ProgramModel

VOCAB, HIDDEN = 7, 3


class Store:
    """Programs whose logits are the sum of the hidden states; the last word is the greedy one."""

    def __init__(self) -> None:
        self.executable, self.ran = self, list[str]()

    def ensure(self, _key: ProgramKey) -> None:
        return None

    def run(self, name: str, inputs: Mapping[str, Tensor], *_tokens: int) -> tuple[Tensor, Tensor]:
        self.ran.append(name)
        logits_BV = inputs["hidden"].sum(-1, keepdim=True) + torch.arange(VOCAB)
        return logits_BV, logits_BV.argmax(-1)


class Sizes:
    """What the model reads of a geometry."""

    table = ProgramTable(chunk=4, decode_buckets=(1, 2), block_size=4, num_blocks_per_seq=2)
    takes_embeds = False
    num_blocks_per_seq = 2


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def model(store: Store) -> ProgramModel:
    return ProgramModel(cast(Geometry, Sizes()), cast(Programs, store))


def rows(count: int) -> Tensor:
    return torch.ones(count, HIDDEN)


def read(model: ProgramModel, count: int, **step: Any) -> Tensor:
    model.begin_step(**step)
    return model.compute_logits(rows(count))


def test_logits_that_nobody_reads_are_not_computed(model: ProgramModel, store: Store) -> None:
    first = read(model, 1, draws=True).clone()
    assert not read(model, 1, draws=False).any()
    assert model.greedy_tokens.tolist() == [0]
    assert store.ran == ["logits_b1_q1"]
    assert torch.equal(read(model, 1, draws=True), first)
    assert model.greedy_tokens.tolist() == [VOCAB - 1]


def test_only_the_logits_of_the_step_itself(model: ProgramModel, store: Store) -> None:
    """Those of the prompt's tokens are read even where no token is drawn."""
    read(model, 1, draws=True)
    read(model, 1, draws=False)
    assert model.compute_logits(rows(1)).any()
    assert len(store.ran) == 2


def test_a_sampler_may_write_into_what_nobody_reads(model: ProgramModel) -> None:
    read(model, 1, draws=True)
    read(model, 1, draws=False).fill_(float("nan"))
    assert not read(model, 1, draws=False).any()


def test_the_first_of_all_runs(model: ProgramModel, store: Store) -> None:
    """Its shape and type are not known before."""
    assert read(model, 1, draws=False).shape == (1, VOCAB)
    assert len(store.ran) == 1


def test_a_step_that_failed_says_nothing_of_the_next(model: ProgramModel) -> None:
    read(model, 1, draws=True)
    model.begin_step(draws=False)  # and then its program was missing
    assert read(model, 1, draws=True).any()
