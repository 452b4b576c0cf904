# SPDX-License-Identifier: Apache-2.0
"""When is a bfloat16 output right? The rule, and why.

The truth is Hugging Face's eager model in float32 with the checkpoint's weights. bfloat16 keeps 8
significant bits: every operator rounds by up to 2^-9 of its result, and a logit between 16 and 64
is stored in steps of 1/8 or 1/4. Eager bfloat16 is off by that too, and in another place, because
it rounds in another order. So we ask for no more noise than eager bfloat16 has, and for the same
tokens wherever noise of that size cannot decide:

* NOISE is the root mean square distance of eager bfloat16's logits from the truth. The difference
  of two logits has sqrt(2) NOISE, and 6 NOISE are more than 4 of those: a token may differ from the
  truth's choice only where the truth puts it less than 6 NOISE below the best.
* Hence, tokens are those of float32 up to the first near-tie of that size. After it the text is
  another one, so from there every token is judged given the tokens before it.
* The log-probabilities of our tokens are, in the root mean square, at most 1.5 times as far from
  the truth as eager bfloat16's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vllm import RequestOutput

from tests.engine.engines import tokens_of
from tests.oracle import Greedy, load_model

NEAR_TIE = 6.0
MORE_NOISE = 1.5


@dataclass(frozen=True)
class Judged:
    """One output beside the truth (`n` tokens, `V` logits, given the same tokens before)."""

    output: RequestOutput
    truth_NV: Tensor
    eager_NV: Tensor

    @property
    def tokens(self) -> Tensor:
        return torch.tensor(tokens_of(self.output))

    @property
    def below_best(self) -> Tensor:
        """How far below the truth's best logit each of our tokens is."""
        chosen_N = self.truth_NV.gather(1, self.tokens[:, None])[:, 0]
        return self.truth_NV.max(dim=-1).values - chosen_N

    @property
    def our_error(self) -> Tensor:
        """Log-probability errors of our tokens; the output must carry `logprobs`."""
        places = self.output.outputs[0].logprobs
        assert places is not None
        ours = [place[t].logprob for place, t in zip(places, tokens_of(self.output), strict=True)]
        return torch.tensor(ours) - self._logprobs(self.truth_NV)

    @property
    def eager_error(self) -> Tensor:
        return self._logprobs(self.eager_NV) - self._logprobs(self.truth_NV)

    def _logprobs(self, logits_NV: Tensor) -> Tensor:
        return torch.log_softmax(logits_NV, dim=-1).gather(1, self.tokens[:, None])[:, 0]


def check_bf16(model_dir: Path, outputs: Sequence[RequestOutput], truth: Sequence[Greedy]) -> float:
    """Applies the rule to greedy outputs with `logprobs`. Returns the share of equal tokens.

    `truth` is float32's greedy text for the same prompts, at least as long.
    """
    judged = [_judge(model_dir, output) for output in outputs]
    noise = _rms(torch.cat([(j.eager_NV - j.truth_NV).flatten() for j in judged]))
    for item in judged:
        worst = float(item.below_best.max())
        assert worst < NEAR_TIE * noise, f"token {worst:.3f} below the best, noise {noise:.3f}"
    ours = _rms(torch.cat([j.our_error for j in judged]))
    eager = _rms(torch.cat([j.eager_error for j in judged]))
    assert ours < MORE_NOISE * eager, f"log-probabilities: {ours:.4f} off, eager {eager:.4f}"
    pairs = [(tokens_of(output), item) for output, item in zip(outputs, truth, strict=True)]
    equal = sum(_equal_tokens(tokens, item, NEAR_TIE * noise) for tokens, item in pairs)
    return equal / sum(len(tokens) for tokens, _ in pairs)


def _equal_tokens(tokens: list[int], truth: Greedy, bound: float) -> int:
    """How many tokens are equal before the first difference, which must be at a near-tie."""
    for index, token in enumerate(tokens):
        if token != truth.token_ids[index]:
            assert truth.gaps[index] < bound, f"token {index} of {tokens} is wrong"
            return index
    return len(tokens)


@torch.inference_mode()
def _judge(model_dir: Path, output: RequestOutput) -> Judged:
    before = list(output.prompt_token_ids or ())
    ids = torch.tensor([[*before, *tokens_of(output)]])
    logits = [
        load_model(model_dir, dtype)(ids).logits[0, len(before) - 1 : -1].float()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return Judged(output, *logits)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
