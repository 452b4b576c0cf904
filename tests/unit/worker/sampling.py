# SPDX-License-Identifier: Apache-2.0
"""A sampler on eager operators, and what steps ask of it."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from rbln_host.ops import mask_tokens, sample
from rbln_vllm.programs import ProgramTable
from rbln_vllm.worker.sampling import DrawKeys, ProgramSampler, SamplerPrograms, SeededSampler

ROWS, VOCABULARY = 3, 70
CPU = torch.device("cpu")
TABLE = ProgramTable(chunk=4, decode_buckets=(1, 2, 4), block_size=4, num_blocks_per_seq=2)


class FakeStore:
    """Runs the eager operators in place of programs, and notes which."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[int] = []
        self.executable = self

    def ensure(self, _key: object) -> None:
        pass

    def run(self, name: str, inputs: Mapping[str, Tensor], rows: int) -> tuple[Tensor, ...]:
        self.names.append(name)
        self.rows.append(rows)
        logits = inputs["logits"]
        assert len({tensor.shape[0] for tensor in inputs.values()}) == 1
        if name.startswith("mask"):
            mask_tokens(inputs["bitmask"], logits)
            return ()
        assert inputs["position"][rows:].tolist() == [-1] * (logits.shape[0] - rows)
        return sample(
            logits,
            inputs["temperature"],
            inputs["top_k"],
            inputs["top_p"],
            inputs["seed"],
            inputs["position"],
            inputs.get("bitmask"),
        )


class Fixture:
    """A sampler over three requests with seeds 11, 12 and none, that have 0, 4 and 7 tokens."""

    def __init__(self, kind: type[SeededSampler] = ProgramSampler, mode: str = "raw_logprobs"):
        self.requests = {
            f"r{row}": SimpleNamespace(sampling_params=SamplingParams(seed=seed))
            for row, seed in enumerate((11, 12, None))
        }
        self.batch = SimpleNamespace(
            req_ids=["r0", "r1", "r2"],
            num_prompt_tokens=np.array([5, 2, 1, 99], dtype=np.int32),
            num_tokens_no_spec=np.array([5, 6, 8, 0], dtype=np.int32),
        )
        self.store = FakeStore()
        self.keys = DrawKeys(self.requests, lambda: self.batch, 0)
        programs: Any = SamplerPrograms(TABLE, self.store)  # type: ignore[arg-type]
        config: Any = SimpleNamespace(logprobs_mode=mode, use_fp64_gumbel=False)
        self.greedy_R = torch.tensor([7, 8, 9])
        more = (lambda: self.greedy_R,) if kind is ProgramSampler else ()
        self.sampler = kind(config, programs, self.keys, *more)


def logits_of(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(ROWS, VOCABULARY, generator=generator)).to(dtype)


def metadata(**changes: Any) -> SamplingMetadata:
    """Three greedy rows that ask for nothing else."""
    zeros = torch.zeros(ROWS)
    plain = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1,
        output_token_ids=[[], [], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([bias(), min_tokens(), min_p()]),
    )
    return replace(plain, **changes)


def sampled(**changes: Any) -> SamplingMetadata:
    """The first and the last row draw, the second is greedy."""
    temperature = torch.tensor([0.8, 0.0, 1.3])
    return metadata(**{"temperature": temperature, "all_greedy": False, **changes})


def bias(biases: dict[int, dict[int, float]] | None = None) -> LogitBiasLogitsProcessor:
    processor = LogitBiasLogitsProcessor(None, CPU, False)
    if biases:
        processor.biases = biases
        rows = [row for row, one in biases.items() for _ in one]
        ids = [token for one in biases.values() for token in one]
        values = [value for one in biases.values() for value in one.values()]
        processor.logits_slice = (torch.tensor(rows), torch.tensor(ids))
        processor.bias_tensor = torch.tensor(values)
    return processor


def min_tokens(rows: dict[int, Any] | None = None) -> MinTokensLogitsProcessor:
    config: Any = SimpleNamespace()
    processor = MinTokensLogitsProcessor(config, CPU, False)
    processor.min_toks = rows or {}
    return processor


def min_p(values: list[float] | None = None) -> MinPLogitsProcessor:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    processor = MinPLogitsProcessor(config, CPU, False)
    if values:
        processor.min_p_count = sum(value > 0 for value in values)
        processor.min_p = torch.tensor(values).unsqueeze(1)
    return processor


class Adapter(AdapterLogitsProcessor):
    """With processors of some requests, by row."""

    def __init__(self, rows: dict[int, Any]) -> None:
        config: Any = SimpleNamespace()
        super().__init__(config, CPU, False)
        self.req_info = rows

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: object) -> None:
        return None


HOLDER = SimpleNamespace(has_tracked_requests=lambda: True)
CHANGES: dict[str, dict[str, Any]] = {
    "presence_penalty": {"no_penalties": False},
    "logit_bias": {"logitsprocs": LogitsProcessors([bias({0: {1: 2.0}})])},
    "min_tokens": {"logitsprocs": LogitsProcessors([min_tokens({0: (1, [], set(), False)})])},
    "bad_words": {"bad_words_token_ids": {0: [[1]]}},
    "allowed_token_ids": {
        "allowed_token_ids_mask": torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    },
    "logprobs": {"max_num_logprobs": 0},
    "logprob_token_ids": {"logprob_token_ids": {0: [1]}},
    "thinking_token_budget": {"thinking_budget_state_holder": HOLDER},
}
