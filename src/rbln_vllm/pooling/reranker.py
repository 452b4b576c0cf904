# SPDX-License-Identifier: Apache-2.0
"""The original Qwen3-Reranker: a causal model whose answers "yes" and "no" make a score.

``score = sigmoid(logit of yes - logit of no)`` at the last token, as its model card has it. The
difference of the two rows of the output embedding is a classifier of one label; vLLM's overrides
say which tokens they are.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

ARCHITECTURE = "Qwen3ForSequenceClassification"
FLAG, TOKENS = "is_original_qwen3_reranker", "classifier_from_token"
OVERRIDES = f'{{"architectures": ["{ARCHITECTURE}"], "{TOKENS}": ["no", "yes"], "{FLAG}": true}}'


def is_original_reranker(config: Any) -> bool:
    """Whether a Hugging Face configuration, after overrides, is one."""
    return bool(getattr(config, FLAG, False))


def check_overrides(overrides: object) -> None:
    """ValueError for ``--hf-overrides`` that mean a reranker and do not say all of it."""
    if not isinstance(overrides, Mapping):
        return
    flag, tokens = overrides.get(FLAG), overrides.get(TOKENS)
    if not flag and tokens is None:
        return
    if not flag or tokens is None:
        missing = FLAG if not flag else TOKENS
        raise ValueError(f"--hf-overrides lack {missing}: give all of '{OVERRIDES}'")
    if overrides.get("architectures", [ARCHITECTURE]) != [ARCHITECTURE]:
        raise ValueError(f"--hf-overrides: {FLAG} is for the architecture {ARCHITECTURE} alone")
    _check_two(tokens)


def _check_two(tokens: object) -> None:
    if not isinstance(tokens, list | tuple) or len(tokens) != 2:
        raise ValueError(
            f'--hf-overrides: {TOKENS} must be two tokens, the answer no first ("no", "yes"), '
            f"not {tokens!r}"
        )


def answer_ids(model: "ModelConfig") -> tuple[int, int]:
    """Vocabulary ids of the two answers, no and yes.

    Raises ValueError when they are not two, or one of them is not a token of the vocabulary.
    """
    from vllm.tokenizers import get_tokenizer

    tokenizer: Any = get_tokenizer(
        model.tokenizer,
        revision=model.tokenizer_revision,
        tokenizer_mode=model.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
    )
    return ids_of_answers(model.hf_config, tokenizer)


def ids_of_answers(config: Any, tokenizer: Any) -> tuple[int, int]:
    """As :func:`answer_ids`, of a Hugging Face configuration and tokenizer."""
    tokens = getattr(config, TOKENS, None)
    _check_two(tokens)
    ids = [tokenizer.encode(str(token), add_special_tokens=False) for token in tokens or ()]
    for token, found in zip(tokens or (), ids, strict=True):
        if len(found) != 1:
            raise ValueError(
                f"--hf-overrides: {TOKENS} {token!r} is {len(found)} tokens of this model's "
                "vocabulary and must be one"
            )
    (no,), (yes,) = ids
    return int(no), int(yes)
