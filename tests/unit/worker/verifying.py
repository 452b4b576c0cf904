# SPDX-License-Identifier: Apache-2.0
"""A verifier on eager operators, and steps with drafts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler

from rbln_vllm.programs import ProgramTable
from rbln_vllm.worker.sampling import DrawKeys, ProgramSampler, SamplerPrograms, SeededSampler
from rbln_vllm.worker.speculation.verify import ScheduledDrafts, Verifier
from tests.unit.worker.sampling import FakeStore, metadata, min_tokens

MOST = 3
BOTH = pytest.mark.parametrize("kind", [ProgramSampler, SeededSampler])


class Fixture:
    """A verifier over requests ``r0``, ... with the seeds given and these outputs so far."""

    def __init__(
        self,
        seeds: list[int | None],
        outputs: list[list[int]] | None = None,
        kind: type[SeededSampler] = ProgramSampler,
    ) -> None:
        rows = len(seeds)
        self.outputs = outputs or [[] for _ in seeds]
        requests = {
            f"r{row}": SimpleNamespace(sampling_params=SamplingParams(seed=seed))
            for row, seed in enumerate(seeds)
        }
        lengths = [len(output) for output in self.outputs]
        batch = SimpleNamespace(
            req_ids=list(requests),
            num_prompt_tokens=np.full(rows, 5, dtype=np.int32),
            num_tokens_no_spec=np.array([5 + length for length in lengths], dtype=np.int32),
        )
        table = ProgramTable(4, (rows,), 4, 2, decode_queries=(1, MOST + 1))
        self.store = FakeStore()
        self.batch = batch
        self.keys = DrawKeys(requests, lambda: batch, 0)
        programs: Any = SamplerPrograms(table, self.store)  # type: ignore[arg-type]
        config: Any = SimpleNamespace(logprobs_mode="raw_logprobs", use_fp64_gumbel=False)
        more = (lambda: torch.empty(0),) if kind is ProgramSampler else ()
        self.sampler = kind(config, programs, self.keys, *more)
        self.verifier = Verifier(self.sampler, self.keys, lambda: self.outputs)

    def __call__(
        self, drafts: list[tuple[int, ...]], logits_RV: Tensor, step: SamplingMetadata
    ) -> SamplerOutput:
        return self.verifier(ScheduledDrafts(tuple(drafts)), None, logits_RV, step)

    def tokens(
        self, drafts: list[tuple[int, ...]], logits_RV: Tensor, step: SamplingMetadata
    ) -> list[list[int]]:
        """As vLLM's runner takes them."""
        output = self(drafts, logits_RV, step)
        tokens, _ = RejectionSampler.parse_output(
            output.sampled_token_ids, logits_RV.shape[1], (), output.logprobs_tensors
        )
        return list(tokens)


def step_of(rows: int, temperature: float = 0.0, **changes: Any) -> SamplingMetadata:
    zeros = torch.zeros(rows)
    sizes = {
        "frequency_penalties": zeros,
        "presence_penalties": zeros,
        "repetition_penalties": zeros + 1,
        "output_token_ids": [],
        "logitsprocs": LogitsProcessors([min_tokens()]),
    }
    if temperature:
        drawn = {"temperature": zeros + temperature, "all_greedy": False, "all_random": True}
        sizes.update(drawn)
    return metadata(**{**sizes, **changes})


def logits_of(rows: int, vocabulary: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(rows, vocabulary, generator=generator)
