# SPDX-License-Identifier: Apache-2.0
"""What adapters cost a decode step and a prefill: programs with them beside programs without.

Forward programs alone, of SmolLM2-135M in bf16 at a context of 300 tokens. An adapter changes every
linear of every layer. Steps of the kinds are taken in turn, so that what else the machine does
falls on all of them; times are medians.

usage: python -m benchmarks.lora MODEL [--rank R] [--adapters N] [--batch B] [--rounds N]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.environment import write_result
from benchmarks.report import markdown_table
from rbln_vllm.devices import resolve_profile
from rbln_vllm.geometry import Geometry
from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.lora.slots import AdapterSlots, LowRank
from rbln_vllm.models.kv_layers import kv_input_name
from rbln_vllm.models.transformers.builder import TransformersModelBuilder
from rbln_vllm.models.transformers.source import ModelSource
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import NO_ADAPTER, SLOTS_INPUT, Executable, host_toolchain

CONTEXT, BLOCK, CHUNK = 300, 512, 256


@dataclass(frozen=True)
class Kind:
    """Steps of one kind: a run of the program, and of how many adapters."""

    name: str
    step: Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    geometry = Geometry(resolve_profile(None), CHUNK, BLOCK, BLOCK, args.batch, (args.batch,))
    config = AutoConfig.from_pretrained(args.model)
    source = ModelSource(config, str(args.model), torch.bfloat16)
    shape = AdapterShape(args.adapters, args.rank, torch.bfloat16)
    without, adapted = Bench(source, geometry, None), Bench(source, geometry, shape)
    rows = []
    for key in (*geometry.table.decodes, geometry.table.prefill):
        kinds = [
            Kind("without LoRA", without.step(key, 0)),
            Kind("no token has an adapter", adapted.step(key, 0)),
            Kind("every token has one of 1", adapted.step(key, 1)),
        ]
        if key.batch > 1:
            kinds.append(Kind(f"one of {args.adapters}", adapted.step(key, args.adapters)))
        rows += measured(key, kinds, args.rounds)
    print(markdown_table(list(rows[0]), [list(map(str, row.values())) for row in rows]))
    if args.json:
        facts = {"rank": args.rank, "adapters": args.adapters}
        write_result(args.json, {"benchmark": "lora", **facts, "rows": rows})


def measured(key: ProgramKey, kinds: list[Kind], rounds: int) -> list[dict[str, object]]:
    """Milliseconds of each kind, and how much that is of the first."""
    taken: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    for number in range(rounds + 3):
        for kind in kinds:
            started = time.perf_counter()
            kind.step()
            if number >= 3:
                taken[kind.name].append((time.perf_counter() - started) * 1e3)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    first = medians[kinds[0].name]
    return [
        {
            "program": key.name,
            "step": name,
            "median (ms)": f"{median:.2f}",
            "least (ms)": f"{min(taken[name]):.2f}",
            "beside": f"{median / first:.2f}x",
        }
        for name, median in medians.items()
    ]


class Bench:
    """The forward programs of a model, with random adapters in every slot."""

    def __init__(self, source: ModelSource, geometry: Geometry, shape: AdapterShape | None) -> None:
        self._geometry = geometry
        builder = TransformersModelBuilder(source, geometry, shape)
        table, toolchain = geometry.table, host_toolchain()
        self._executable: Executable = toolchain.new_executable()
        self._executable.add(*builder.compile([*table.decodes, table.prefill], toolchain))
        self._executable.bind_kv(
            {
                kv_input_name(index): torch.zeros(
                    geometry.max_num_seqs + 1, *layer.block_shape(BLOCK), dtype=layer.torch_dtype
                )
                for index, layer in enumerate(builder.kv_layers)
            }
        )
        if builder.adapters is not None:
            slots = AdapterSlots(builder.adapters)
            for slot in range(builder.adapters.slots):
                slots.fill(slot, _random_adapter(slots))
            self._executable.bind(slots.inputs)

    def step(self, key: ProgramKey, adapters: int) -> Callable[[], object]:
        """A run in which the tokens have so many adapters in turn; 0 for none."""
        inputs = self._inputs(key, adapters)
        return lambda: self._executable.run(key.name, inputs)

    def _inputs(self, key: ProgramKey, adapters: int) -> Mapping[str, Tensor]:
        tokens = key.num_tokens
        positions = torch.full((tokens,), CONTEXT) if key.query == 1 else torch.arange(tokens)
        blocks = torch.arange(1, key.batch + 1, dtype=torch.int32)[:, None]
        slots = torch.full((tokens,), NO_ADAPTER, dtype=torch.int32)
        if adapters:
            slots = (torch.arange(tokens) % adapters).to(torch.int32)
        return {
            "input_ids": torch.arange(tokens, dtype=torch.int32) + 100,
            "positions": positions,
            "block_table": blocks,
            "slots": blocks.repeat_interleave(key.query, 0)[:, 0].long() * BLOCK + positions,
            "query_pos": positions.to(torch.int32),
            SLOTS_INPUT: slots,
        }


def _random_adapter(slots: AdapterSlots) -> dict[str, LowRank]:
    adapters = slots.adapters
    return {
        module.name: LowRank(
            torch.randn(adapters.rank, module.in_features) / 50,
            torch.randn(module.out_features, adapters.rank) / 50,
        )
        for module in adapters.adapted
    }


if __name__ == "__main__":
    main()
