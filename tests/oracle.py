# SPDX-License-Identifier: Apache-2.0
"""The oracle of greedy decoding: Hugging Face's eager model, one sequence at a time."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import blake3
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.exaone import TWIN
from tests.models import ROOT

CACHE = ROOT / ".cache" / "hf-greedy"


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation and, per token, how far its logit was above the second best."""

    token_ids: list[int]
    gaps: list[float]

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.gaps)


def hf_greedy(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
    ignore_eos: bool = False,
) -> list[Greedy]:
    """Greedy continuations of token-id prompts, kept on disk by content.

    As in vLLM's output, an end-of-sequence token that stops a sequence is its last token.
    """
    key = _key(model_dir, [list(prompt) for prompt in prompts], max_tokens, str(dtype), ignore_eos)
    entry = CACHE / f"{key}.json"
    if entry.exists():
        return [Greedy(**item) for item in json.loads(entry.read_text())]
    model = load_model(model_dir, dtype)
    stops = set() if ignore_eos else _eos_ids(model)
    found = [_greedy(model, list(prompt), max_tokens, stops) for prompt in prompts]
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = entry.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps([asdict(item) for item in found]))
    scratch.replace(entry)
    return found


@torch.inference_mode()
def hf_choice_gaps(
    model_dir: Path,
    prompt: Sequence[int],
    output: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """How far below the best logit the model puts each token of a given output.

    0.0 where the token is the model's own greedy choice after the same prefix. This is the measure
    for half precision: a near-tie may fall either way, and all tokens after it then differ from
    `hf_greedy` for a good reason.
    """
    model = load_model(model_dir, dtype)
    tokens = torch.tensor([[*prompt, *output]])
    logits = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return [float(gap) for gap in logits.max(dim=-1).values - chosen]


@functools.lru_cache(maxsize=2)
def load_model(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The eager model; the last two stay loaded."""
    twin = model_dir / TWIN
    model = AutoModelForCausalLM.from_pretrained(
        twin if twin.exists() else model_dir, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int, stops: set[int]) -> Greedy:
    tokens: list[int] = []
    gaps: list[float] = []
    step, cache = prompt, None
    while len(tokens) < max_tokens:
        output = model(torch.tensor([step]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].float().topk(2)
        step = [int(best.indices[0])]
        tokens += step
        gaps.append(float(best.values[0] - best.values[1]))
        if step[0] in stops:
            break
    return Greedy(tokens, gaps)


def _eos_ids(model: PreTrainedModel) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set(eos) if isinstance(eos, list) else {eos} - {None}


def _key(model_dir: Path, *question: object) -> str:
    versions = (torch.__version__, transformers.__version__, Path(__file__).read_text())
    text = json.dumps([_content_hash(model_dir), question, versions])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _content_hash(model_dir: Path) -> str:
    """A hash of the weights and configurations in a model directory."""
    digest = blake3.blake3()
    for file in sorted(model_dir.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(file.name.encode()).update_mmap(file)
    return str(digest.hexdigest())
