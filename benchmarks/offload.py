# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a long prefix: computed, or brought back from each place it may be.

Every round takes a prefix nobody has seen and asks for one token after it: computed; from the
pool (prefix cache); from memory and from disk, after the tiers above have forgotten it. ``disk``
reads files the system still caches, ``disk, cold`` files it was told to drop. Loads are forced
(``load_policy`` ``always``), whatever the engine measures.

usage: python -m benchmarks.offload MODEL [--tokens N] [--rounds N] [--directory DIR] [--json FILE]
       [--into PAGE]
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams

from benchmarks.report import add_output_options, markdown_table, publish
from benchmarks.stepping import random_prompt

BLOCK, QUESTION = 128, 16
SECONDS_TO_STORE = 60.0


@dataclass(frozen=True)
class Way:
    """How the prefix comes back, and what must be forgotten for it to come from there."""

    name: str
    prepare: Callable[["Bench"], None]
    loads: bool


class Bench:
    """One engine with all tiers, and the prefix of the round."""

    def __init__(self, model: str, tokens: int, directory: Path) -> None:
        self.tokens, self.directory = tokens, directory
        self._rng = np.random.default_rng(0)
        self.prefix: list[int] = []
        extra = {
            "cpu_bytes_to_use": 4 << 30,
            "disk_directory": str(directory),
            "load_policy": "always",
        }
        self.llm = LLM(
            model,
            block_size=BLOCK,
            max_model_len=tokens + BLOCK,
            max_num_seqs=4,
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )

    def time_to_first_token(self) -> tuple[float, int]:
        """Seconds, and the tokens that were not computed."""
        question = random_prompt(self._rng, QUESTION)
        prompt = {"prompt_token_ids": self.prefix + question}
        began = time.perf_counter()
        (output,) = self.llm.generate(
            [prompt],
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )
        return time.perf_counter() - began, output.num_cached_tokens or 0

    def new_prefix(self) -> None:
        self.prefix = random_prompt(self._rng, self.tokens)
        self._expected_files = len(self._files()) + self.tokens // BLOCK

    def wait_until_stored(self) -> None:
        """Raises TimeoutError when the blocks of the prefix do not appear on disk."""
        deadline = time.monotonic() + SECONDS_TO_STORE
        while len(self._files()) < self._expected_files:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.directory} has {len(self._files())} blocks")
            time.sleep(0.05)
        time.sleep(0.2)

    def forget(self, memory: bool) -> None:
        """The pool forgets its prefixes; with ``memory`` so does the memory tier."""
        if not self.llm.reset_prefix_cache(reset_connector=memory):
            raise RuntimeError("the prefix cache is in use")

    def drop_page_cache(self) -> None:
        for path in self._files():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def forget_and_drop(self) -> None:
        self.forget(memory=True)
        self.drop_page_cache()

    def _files(self) -> list[Path]:
        return list(self.directory.rglob("*.kv"))


WAYS = (
    Way("computed", Bench.new_prefix, loads=False),
    Way("pool", Bench.wait_until_stored, loads=True),
    Way("memory", lambda bench: bench.forget(memory=False), loads=True),
    Way("disk", lambda bench: bench.forget(memory=True), loads=True),
    Way("disk, cold", Bench.forget_and_drop, loads=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of the block, 128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    add_output_options(parser)
    args = parser.parse_args()
    if args.directory is not None:
        args.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        bench = Bench(args.model, args.tokens, Path(directory))
        measure_round(bench)  # the first of everything is slower
        rounds = [measure_round(bench) for _ in range(args.rounds)]
    result = {"benchmark": "offload", "tokens": args.tokens, "block": BLOCK, "rounds": rounds}
    publish(args, "offload", markdown(rounds), result)


def measure_round(bench: Bench) -> dict[str, float]:
    """Milliseconds of each way. Raises RuntimeError when a prefix did not come from anywhere."""
    taken: dict[str, float] = {}
    for way in WAYS:
        way.prepare(bench)
        seconds, cached = bench.time_to_first_token()
        if (cached >= bench.tokens) is not way.loads:
            raise RuntimeError(f"{way.name}: {cached} of {bench.tokens} tokens were not computed")
        taken[way.name] = seconds * 1e3
    return taken


def markdown(rounds: list[dict[str, float]]) -> str:
    """Medians, spreads, and how much sooner than computing."""
    computed = statistics.median(taken["computed"] for taken in rounds)
    rows = []
    for way in WAYS:
        values = [taken[way.name] for taken in rounds]
        middle = statistics.median(values)
        spread = f"{min(values):.0f}-{max(values):.0f}"
        rows.append([way.name, f"{middle:.0f}", spread, f"{computed / middle:.1f}"])
    return markdown_table(["prefix is", "TTFT ms", "range", "times sooner"], rows)


if __name__ == "__main__":
    main()
