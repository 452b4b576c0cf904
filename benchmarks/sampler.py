# SPDX-License-Identifier: Apache-2.0
"""What a step's sampling costs, by programs and by vLLM's sampler, over a vocabulary of 49,152.

From logits in bf16 to token ids, with all that is done in Python on the way. Logits are normal
with a deviation of 2.5: flatter than a language model's, so that 90 % of the probability are some
2,000 tokens at temperature 0.8. Times are medians; the two are not taken in turn, since torch's
threads go on spinning after vLLM's.

usage: python -m benchmarks.sampler [--rounds N] [--batches 1 32] [--json FILE]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from benchmarks.environment import write_result
from benchmarks.report import markdown_table
from rbln_vllm.models.sampler import capture_sampler
from rbln_vllm.programs import ProgramTable
from rbln_vllm.toolchain import Executable, host_toolchain
from rbln_vllm.worker.sampling import DrawKeys, ProgramSampler, SamplerPrograms

VOCABULARY, DEVIATION = 49_152, 2.5
PARAMETERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-p 0.99": {"temperature": 0.8, "top_p": 0.99},
    "top-p 0.9 of a flat choice": {"temperature": 3.0, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
MASKS: dict[str, int | None] = {
    "": None,
    ", constrained": 500,
    ", hardly constrained": VOCABULARY - 500,
}
"""How many tokens the grammar of a row allows."""


class Loaded:
    """The sampler programs of some batch sizes, compiled in memory."""

    def __init__(self, table: ProgramTable) -> None:
        toolchain = host_toolchain()
        compiler = toolchain.compiler(torch.nn.Module())
        self.executable: Executable = toolchain.new_executable()
        self.executable.add(
            *(capture_sampler(key, compiler, VOCABULARY, torch.bfloat16) for key in table.samplers)
        )

    def ensure(self, _key: object) -> None:
        """All are there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = ProgramTable(1, tuple(sorted(args.batches)), 1, 1)
    loaded: Any = Loaded(table)
    rows = [row for batch in args.batches for row in measured(table, loaded, batch, args.rounds)]
    print(markdown_table(list(rows[0]), [list(map(str, row.values())) for row in rows]))
    if args.json:
        write_result(args.json, {"benchmark": "sampler", "rows": rows})


def measured(
    table: ProgramTable, store: Any, batch: int, rounds: int
) -> Iterator[dict[str, object]]:
    """Milliseconds of each kind of step."""
    logits_RV = (torch.randn(batch, VOCABULARY) * DEVIATION).bfloat16()
    ours, vllms = program_sampler(table, store, batch), Sampler()
    for (kind, parameters), (suffix, allowed) in product(PARAMETERS.items(), MASKS.items()):
        if not parameters and allowed is None:
            continue  # the logits program has chosen
        metadata = metadata_of(batch, **parameters)
        mask = None if allowed is None else bitmask(batch, allowed)
        taken = times_of(programs_step(ours, logits_RV, metadata, mask), 10 * rounds)
        row: dict[str, object] = {"batch": batch, "kind": kind + suffix}
        row["programs (ms)"] = f"{statistics.median(taken):.3f}"
        row["least (ms)"] = f"{min(taken):.3f}"
        row["vLLM (ms)"] = ""
        if mask is None:
            beside = times_of(lambda m=metadata: vllms(logits_RV, m), rounds)  # type: ignore[misc]
            row["vLLM (ms)"] = f"{statistics.median(beside):.2f}"
        yield row


def programs_step(
    sampler: ProgramSampler, logits_RV: Tensor, metadata: SamplingMetadata, mask: Tensor | None
) -> Callable[[], object]:
    def step() -> object:
        sampler.constrain(mask)
        return sampler(logits_RV, metadata)

    return step


def times_of(step: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds, after rounds that do not count."""
    taken = []
    for _ in range(rounds + 5):
        started = time.perf_counter()
        step()
        taken.append((time.perf_counter() - started) * 1e3)
    return taken[5:]


def program_sampler(table: ProgramTable, store: Any, batch: int) -> ProgramSampler:
    """With requests that have no seed of their own."""
    names = [str(row) for row in range(batch)]
    state = SimpleNamespace(sampling_params=SamplingParams())
    lengths = np.full(batch, 7, dtype=np.int32)
    rows = SimpleNamespace(req_ids=names, num_prompt_tokens=lengths, num_tokens_no_spec=lengths + 3)
    keys = DrawKeys(dict.fromkeys(names, state), lambda: rows, 0)
    config: Any = SimpleNamespace(logprobs_mode="raw_logprobs", use_fp64_gumbel=False)
    return ProgramSampler(config, SamplerPrograms(table, store), keys, lambda: torch.empty(0))


def metadata_of(
    batch: int, temperature: float = 0.0, top_k: float = 0, top_p: float = 1.0
) -> SamplingMetadata:
    """Rows that ask for nothing else."""
    zeros = torch.zeros(batch)
    return SamplingMetadata(
        temperature=torch.full((batch,), temperature) if temperature else None,
        all_greedy=not temperature,
        all_random=bool(temperature),
        top_p=torch.full((batch,), top_p) if top_p < 1 else None,
        top_k=torch.full((batch,), int(top_k), dtype=torch.int32) if top_k else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def bitmask(batch: int, allowed: int) -> Tensor:
    """Some tokens of every row, here and there."""
    allowed_RV = np.zeros((batch, VOCABULARY), dtype=bool)
    for row in range(batch):
        allowed_RV[row, torch.randperm(VOCABULARY)[:allowed].numpy()] = True
    words_RW = np.packbits(allowed_RV, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words_RW)


if __name__ == "__main__":
    main()
