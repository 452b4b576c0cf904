# SPDX-License-Identifier: Apache-2.0
"""Warm-up: run every available program once, on nothing but padding."""

import time

import numpy as np

from rbln_vllm.programs import ProgramKey, ProgramTable, Role
from rbln_vllm.worker.embed_programs import embeds_spec
from rbln_vllm.worker.inputs import StagedInputs, StepInputs
from rbln_vllm.worker.pooling.inputs import EncoderInputs, StagedEncoder
from rbln_vllm.worker.program_store import ProgramStore


def warm_up(table: ProgramTable, store: ProgramStore, num_blocks_per_seq: int) -> float:
    """Loads programs and touches their weights; the KV pool is not written. Returns seconds.

    Programs that were not compiled at start (warm-up off) are left for their first use.
    """
    started = time.perf_counter()
    for key in table.programs:
        if key.name not in store.executable.program_names:
            continue
        if key.role in (Role.PREFILL, Role.DECODE):
            spec = embeds_spec(store.executable, key) if table.takes_embeds else None
            _run_padding(key, store, StagedInputs(key, num_blocks_per_seq, spec))
        elif key.role is Role.ENCODER:
            _run_no_sequence(key, store)
        else:
            store.executable.load(key.name)
    return time.perf_counter() - started


def _run_no_sequence(key: ProgramKey, store: ProgramStore) -> None:
    none = np.empty(0, np.int64)
    inputs = StagedEncoder(key).stage(EncoderInputs(none, none, none))
    store.executable.run(key.name, inputs)


def _run_padding(key: ProgramKey, store: ProgramStore, staged: StagedInputs) -> None:
    blocks = staged.tensors["block_table"].shape[1]
    none, no_rows = np.empty(0, np.int64), np.empty((0, blocks), np.int64)
    nothing = StepInputs(none, none, none, none, no_rows)
    store.executable.run(key.name, staged.stage(nothing))
