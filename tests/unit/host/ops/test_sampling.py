# SPDX-License-Identifier: Apache-2.0
"""The random numbers and the draw of the eager reference."""

import torch

from rbln_host.ops.sampling import philox, sample, uniform


def test_philox_gives_the_published_numbers() -> None:
    """The known answers of Random123's `kat_vectors` for philox4x32, 10 rounds."""
    assert philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((1 << 128) - 1, (1 << 64) - 1) == ones
    counter = 0x0370734413198A2E85A308D3243F6A88
    pi = (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert philox(counter, 0x299F31D0A4093822) == pi


def test_numbers_are_in_range_and_differ() -> None:
    numbers = [uniform(seed, position) for seed in (-1, 0, 1) for position in range(300)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.06


def test_the_first_token_at_which_the_running_sum_exceeds_the_number() -> None:
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for position in range(200):
        number = uniform(9, position)
        token, _ = sample(
            shares.log(),
            torch.ones(1),
            torch.zeros(1, dtype=torch.int32),
            torch.ones(1),
            torch.tensor([9]),
            torch.tensor([position]),
        )
        assert token.item() == (1 if number < 0.25 else 3 if number < 0.75 else 4)
