# SPDX-License-Identifier: Apache-2.0
"""Whole sequences one after another in an encoder program's buffers, and padding after them."""

import numpy as np
import pytest

from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.worker.pooling.inputs import EncoderInputs, StagedEncoder, encoder_step, places


def step(*lengths: int) -> EncoderInputs:
    tokens = sum(lengths)
    ids = np.arange(100, 100 + tokens)
    return EncoderInputs(ids, np.ones(tokens, np.int64), np.array(lengths, np.int64))


def staged(encoder: StagedEncoder, inputs: EncoderInputs) -> dict[str, list[int]]:
    return {name: tensor.tolist() for name, tensor in encoder.stage(inputs).items()}


def test_sequences_follow_each_other() -> None:
    encoder = StagedEncoder(ProgramKey(Role.ENCODER, 4, 2))
    for lengths in ((8,), (1, 1, 1, 1), (3, 2)):  # the last must overwrite what was there
        found = staged(encoder, step(*lengths))
    assert found == {
        "input_ids": [100, 101, 102, 103, 104, 0, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0, 0],
        "token_types": [1, 1, 1, 1, 1, 0, 0, 0],
        "row_starts": [0, 3, 5, 5, 5],
    }


def test_nothing_but_padding() -> None:
    found = staged(StagedEncoder(ProgramKey(Role.ENCODER, 2, 2)), step())
    assert all(not any(values) for values in found.values())


@pytest.mark.parametrize("lengths", [(9,), (1, 1, 1, 1, 1)])
def test_a_step_that_does_not_fit(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"do not fit program encoder_b4_q2"):
        StagedEncoder(ProgramKey(Role.ENCODER, 4, 2)).stage(step(*lengths))


def test_lengths_that_are_not_the_tokens() -> None:
    with pytest.raises(ValueError, match="a segment for every token"):
        EncoderInputs(np.zeros(3, int), np.zeros(3, int), np.array([2]))
    with pytest.raises(ValueError, match="a segment for every token"):
        EncoderInputs(np.zeros(3, int), np.zeros(2, int), np.array([3]))


def test_places() -> None:
    rows, positions = places(np.array([2, 1, 3]))
    assert rows.tolist() == [0, 0, 1, 2, 2, 2]
    assert positions.tolist() == [0, 1, 0, 0, 1, 2]


def test_a_step_of_prompts() -> None:
    """Pairs have a second segment from a token on; it may be empty, or all there is."""
    prompts = [[7, 8, 9], [5], [1, 2], [3, 4], [6]]
    found = encoder_step(prompts, [2, None, 0, 2, None])
    assert found.input_ids_N.tolist() == [7, 8, 9, 5, 1, 2, 3, 4, 6]
    assert found.token_types_N.tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 0]
    assert found.lengths_B.tolist() == [3, 1, 2, 2, 1]


def test_segments_that_are_not_the_prompts() -> None:
    with pytest.raises(ValueError, match="zip"):
        encoder_step([[1], [2]], [None])
