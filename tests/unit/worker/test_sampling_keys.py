# SPDX-License-Identifier: Apache-2.0
"""What draws depend on, and masks of grammars, in the order of the batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput

from rbln_vllm.worker.sampling.bitmasks import batch_bitmask
from rbln_vllm.worker.sampling.keys import mixed, signed
from tests.unit.worker.sampling import Fixture


class TestKeys:
    def test_own_seeds_and_positions(self) -> None:
        seed_R, position_R = Fixture().keys.of_step()
        assert seed_R[:2].tolist() == [11, 12]
        assert position_R.tolist() == [0, 4, 7]
        assert seed_R.dtype == position_R.dtype == torch.int64

    def test_tokens_after_one_another(self) -> None:
        seed_R, position_R = Fixture().keys.of_step(np.array([2, 1, 3]))
        assert seed_R[:3].tolist() == [11, 11, 12]
        assert position_R.tolist() == [0, 1, 4, 7, 8, 9]
        assert seed_R.dtype == position_R.dtype == torch.int64

    def test_positions_ahead_are_those_to_come(self) -> None:
        keys = Fixture().keys
        with keys.looking_ahead(2):
            assert keys.of_step()[1].tolist() == [2, 6, 9]
        assert keys.of_step()[1].tolist() == [0, 4, 7]

    def test_others_get_one_that_stays_in_any_row(self) -> None:
        fixture = Fixture()
        first = fixture.keys.of_step()[0][2].item()
        fixture.requests["r3"] = SimpleNamespace(sampling_params=SamplingParams())
        fixture.batch.req_ids = ["r3", "r2"]
        other, again = fixture.keys.of_step()[0].tolist()
        assert again == first != other
        assert Fixture().keys.of_step()[0][2].item() == first, "of the engine's seed"

    def test_a_name_used_again_is_another_request(self) -> None:
        fixture = Fixture()
        first = fixture.keys.of_step()[0][2].item()
        gone = fixture.requests.pop("r2")
        fixture.requests["r4"] = gone
        fixture.batch.req_ids = ["r0", "r1", "r4"]
        fixture.keys.of_step()
        fixture.requests["r2"] = fixture.requests.pop("r4")
        fixture.batch.req_ids = ["r0", "r1", "r2"]
        assert fixture.keys.of_step()[0][2].item() != first

    @pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
    def test_any_seed_fits(self, seed: int) -> None:
        assert signed(seed) & ((1 << 64) - 1) == seed & ((1 << 64) - 1)
        torch.tensor([signed(seed)], dtype=torch.int64)
        torch.Generator().manual_seed(mixed(signed(seed), 3))

    def test_mixed_numbers_differ(self) -> None:
        numbers = {mixed(seed, position) for seed in range(30) for position in range(30)}
        assert len(numbers) == 900


class TestBitmasks:
    def test_rows_of_the_batch(self) -> None:
        """The scheduler's order is not the batch's, and one request has left."""
        masks = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32)
        grammar = GrammarOutput(["b", "gone", "a"], masks)
        bitmask = batch_bitmask(grammar, {"a": 0, "free": 1, "b": 2}, 3)
        assert bitmask.tolist() == [[5, 6], [-1, -1], [1, 2]]

    def test_rows_of_drafts(self) -> None:
        """A mask for the next token and one after each draft, also of a request that has left."""
        masks = np.array([[row, -row] for row in range(1, 8)], dtype=np.int32)
        grammar = GrammarOutput(["b", "gone", "a"], masks)
        count_of = {"a": 2, "gone": 2, "b": 3, "free": 2}
        bitmask = batch_bitmask(grammar, {"a": 0, "free": 2, "b": 4}, 7, count_of)
        rows = [6, 7, None, None, 1, 2, 3]
        assert bitmask.tolist() == [[-1, -1] if row is None else [row, -row] for row in rows]

    def test_none_left(self) -> None:
        grammar = GrammarOutput(["gone"], np.zeros((1, 2), dtype=np.int32))
        assert batch_bitmask(grammar, {"a": 0}, 1).tolist() == [[-1, -1]]
