# SPDX-License-Identifier: Apache-2.0
"""`rbln-vllm compile`, the original removed, `rbln-vllm serve` of what it wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

from rbln_vllm.cli.main import main
from tests.oracle import hf_greedy
from tests.server.live import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    MODEL,
    SEQS,
    empty_cache_root,
    prompt,
    running_server,
)

PROMPTS = [prompt(length) for length in (1, CHUNK + 1)]


def test_serves_without_the_original(tiny_llama_dir: Path, tmp_path: Path) -> None:
    expected = [item.token_ids for item in hf_greedy(tiny_llama_dir, PROMPTS, 8, ignore_eos=True)]
    original = shutil.copytree(tiny_llama_dir, tmp_path / "original")
    compiled = tmp_path / "compiled"
    sizes = {
        "--max-model-len": MAX_LEN,
        "--max-num-seqs": SEQS,
        "--max-num-batched-tokens": CHUNK,
        "--block-size": BLOCK,
    }
    flags = [str(part) for pair in sizes.items() for part in pair]
    assert main(["compile", str(original), "--output", str(compiled), *flags]) == 0
    shutil.rmtree(original)
    log_file, root = tmp_path / "log", empty_cache_root(tmp_path / "cache")
    arguments = [str(compiled), "--served-model-name", MODEL, "--max-num-seqs", "16"]
    with running_server(arguments, log_file, root) as server:
        assert [server.tokens(each, 8) for each in PROMPTS] == expected
        chat = server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert chat.choices[0].message.content
        assert server.metrics()["rbln_programs_compiled_after_ready_total"] == 0
    log = log_file.read_text()
    assert f"--max-num-seqs is {SEQS} in the compiled model, not 16" in log
    assert not list((root / "rbln").glob("*/*/rbln_config.json"))
