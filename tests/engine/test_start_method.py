# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, as a script gets it: forked, or spawned when told to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle import hf_greedy

SCRIPT = """
import multiprocessing, sys
import torch
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.ones(1 << 21).exp()  # starts OpenMP's threads, which a fork loses
    llm = LLM(sys.argv[1], dtype="float32", max_num_seqs=2, kv_cache_memory_bytes=1 << 24)
    (engine,) = multiprocessing.active_children()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    sampled = SamplingParams(temperature=1, top_p=0.9, max_tokens=4, logprobs=1)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, sampled, use_tqdm=False)
    print("RESULT", type(engine).__name__, *output.outputs[0].token_ids)
"""


@pytest.mark.parametrize(
    ("variables", "process"),
    [({}, "ForkProcess"), ({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "SpawnProcess")],
)
def test_a_script_gets_its_tokens(
    variables: dict[str, str], process: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("_VLLM")}
    inherited |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "RBLN_HOST_EXECUTOR": "native"}
    inherited.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_llama_dir)],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    results = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results, done.stdout + done.stderr
    (expected,) = hf_greedy(tiny_llama_dir, [[5, 6, 7]], 8, ignore_eos=True)
    assert results[0][1] == process
    assert list(map(int, results[0][2:])) == list(expected.token_ids)
