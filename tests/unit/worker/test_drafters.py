# SPDX-License-Identifier: Apache-2.0
"""What drafters are told, and the drafters that look tokens up."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rbln_vllm.worker.inputs import StepInputs
from rbln_vllm.worker.speculation.drafters import DraftStep
from rbln_vllm.worker.speculation.host_drafters import NgramDrafter, SuffixDrafter
from rbln_vllm.worker.speculation.select import drafter_of

MAX_LEN = 24


def step_of(rows: dict[str, tuple[list[int], int, list[int]]]) -> DraftStep:
    """Rows by name: all known tokens, how many of them are new, and the drafts that fell.

    A row whose new tokens are 0 is a prompt of which the first two tokens have been computed.
    """
    tokens_BL = np.zeros((len(rows), MAX_LEN), dtype=np.int32)
    lengths, counts, starts, sampled = [], [], [], []
    for row, (tokens, new, fallen) in enumerate(rows.values()):
        tokens_BL[row, : len(tokens)] = tokens
        lengths.append(len(tokens))
        counts.append(new + len(fallen) if new else 2)
        starts.append(len(tokens) - 1 - new if new else 0)
        sampled.append(tokens[len(tokens) - new :] if new else [])
    positions = [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
    total_N = np.arange(sum(counts))
    return DraftStep(
        request_ids=tuple(rows),
        inputs=StepInputs(
            total_N, np.array(positions), total_N, np.array(counts), np.ones((len(rows), 1), int)
        ),
        sampled_B=sampled,
        tokens_BL=tokens_BL,
        lengths_B=np.array(lengths, dtype=np.int32),
    )


def config_of(drafts: int, **fields: Any) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts, **fields),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


class TestStep:
    def test_what_stands_of_each_row(self) -> None:
        step = step_of(
            {
                "prompt": ([1, 2, 3, 4], 0, []),
                "all": ([1, 2, 3, 4, 5], 3, []),
                "some": ([1, 2, 3, 4, 5], 2, [8, 9]),
                "none": ([1, 2, 3], 1, [8]),
            }
        )
        assert step.num_rows == 4
        assert step.counts_B.tolist() == [2, 3, 4, 2]
        assert step.row_offsets.tolist() == [0, 2, 5, 9]
        assert step.first_positions.tolist() == [0, 1, 2, 1]
        assert step.kept_counts.tolist() == [2, 3, 2, 1]
        assert step.next_tokens.tolist() == [3, 5, 5, 3]

    def test_a_prompt_that_ends_stands_whole(self) -> None:
        tokens = np.array([[5, 6, 7, 8]], dtype=np.int32)  # 8 is new
        three = np.arange(3)
        inputs = StepInputs(three, three, three, np.array([3]), np.ones((1, 1), int))
        step = DraftStep(("a",), inputs, [[8]], tokens, np.array([4]))
        assert step.kept_counts.tolist() == [3]
        assert step.next_tokens.tolist() == [8]

    def test_rows_of_everything(self) -> None:
        step = step_of({"a": ([1, 2], 1, [])})
        with pytest.raises(ValueError, match="1 rows needs as many of everything"):
            DraftStep(("a",), step.inputs, [[1], [2]], step.tokens_BL, step.lengths_B)


@pytest.fixture(scope="module")
def drafter() -> NgramDrafter:
    return NgramDrafter(config_of(3, prompt_lookup_min=2, prompt_lookup_max=3))


class TestNgram:
    def test_what_came_after_the_same_tokens(self, drafter: NgramDrafter) -> None:
        step = step_of(
            {
                "repeats": ([1, 2, 3, 4, 5, 6, 1, 2, 3], 1, []),
                "short": ([1, 2, 3, 9, 1, 2, 3], 2, []),
                "new": ([1, 2, 3, 4, 5, 6, 7, 8], 1, []),
                "prompt": ([1, 2, 3, 1, 2, 3], 0, []),
            }
        )
        assert drafter.propose(step) == [[4, 5, 6], [9, 1, 2], [], []]
        assert drafter.num_speculative_tokens == 3

    @pytest.mark.parametrize("left", [0, 1, 2, 3, 4])
    def test_not_past_the_context(self, drafter: NgramDrafter, left: int) -> None:
        tokens = ([1, 2, 3, 4, 5, 6] * 5)[: MAX_LEN - left]
        (draft,) = drafter.propose(step_of({"a": (tokens, 1, [])}))
        assert len(draft) == min(3, left)


class FakeTrees:
    """Arctic Inference's cache, which notes what it is told and drafts 100, 101, ..."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self.active_requests: set[str] = set()
        self.cached_requests: set[str] = set()
        self.told: list[tuple[Any, ...]] = []

    def start_request(self, name: str, prompt: Any) -> None:
        self.active_requests.add(name)
        self.told.append(("start", name, list(prompt)))

    def add_active_response(self, name: str, new: list[int]) -> None:
        assert name in self.active_requests
        self.told.append(("add", name, new))

    def evict_cached_response(self, name: str) -> None:
        self.cached_requests.remove(name)
        self.told.append(("evict", name))

    def stop_request(self, name: str) -> None:
        self.active_requests.remove(name)
        self.cached_requests.add(name)
        self.told.append(("stop", name))

    def speculate(self, name: str, pattern: Any, max_spec_tokens: int, **_: float) -> Any:
        self.told.append(("speculate", name, list(pattern)))
        return SimpleNamespace(token_ids=list(range(100, 100 + max_spec_tokens)))


@pytest.fixture
def suffix(monkeypatch: pytest.MonkeyPatch) -> SuffixDrafter:
    module: Any = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = FakeTrees
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    fields = {
        "suffix_decoding_max_tree_depth": 4,
        "suffix_decoding_max_cached_requests": 10,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    return SuffixDrafter(config_of(3, **fields))


class TestSuffix:
    def test_a_request_is_told_of_once(self, suffix: SuffixDrafter) -> None:
        assert suffix.propose(step_of({"a": ([1, 2, 3, 4], 1, [])})) == [[100, 101, 102]]
        suffix.propose(step_of({"b": ([1, 2, 3], 0, [])}))  # a prefill of another, without a
        suffix.propose(step_of({"a": ([1, 2, 3, 4, 5, 6], 2, [])}))
        assert suffix._trees.told == [
            ("start", "a", [1, 2, 3]),
            ("add", "a", [4]),
            ("speculate", "a", [1, 2, 3, 4]),
            ("add", "a", [5, 6]),
            ("speculate", "a", [3, 4, 5, 6]),
        ]

    def test_the_end_of_a_request(self, suffix: SuffixDrafter) -> None:
        suffix.propose(step_of({"a": ([1, 2], 1, [])}))
        suffix.forget({"a", "never seen"})
        suffix.propose(step_of({"a": ([7, 8, 9], 1, [])}))
        kinds = [told[0] for told in suffix._trees.told]
        assert kinds == ["start", "add", "speculate", "stop", "evict", "start", "add", "speculate"]

    @pytest.mark.parametrize("left", [0, 1, 2, 3, 4, 5])
    def test_not_past_the_context(self, suffix: SuffixDrafter, left: int) -> None:
        tokens = [1] * (MAX_LEN - left)
        (draft,) = suffix.propose(step_of({"a": (tokens, 1, [])}))
        assert len(draft) == max(0, min(3, left - 1))


def test_a_method_without_a_drafter() -> None:
    config = config_of(3)
    config.speculative_config.method = "nonsense"
    with pytest.raises(ValueError, match="Unsupported speculative decoding method 'nonsense'"):
        drafter_of(config, None, None)  # type: ignore[arg-type]
