# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens equal Hugging Face's eager model, alone and 8 requests at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.oracle import hf_greedy
from tests.server.live import BLOCK, CHUNK, EDGES, LiveServer, prompt

LENGTHS = (*EDGES, BLOCK + 1, 2 * CHUNK + 2)
PROMPTS = [prompt(length) for length in LENGTHS]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> list[list[int]]:
    results = hf_greedy(tiny_llama_dir, PROMPTS, MAX_TOKENS, ignore_eos=True)
    return [result.token_ids for result in results]


def test_alone(server: LiveServer, expected: list[list[int]]) -> None:
    assert [server.tokens(each, MAX_TOKENS) for each in PROMPTS] == expected


def test_eight_at_a_time(server: LiveServer, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in range(3):
            answers = pool.map(lambda each: server.tokens(each, MAX_TOKENS), PROMPTS)
            assert list(answers) == expected
