# SPDX-License-Identifier: Apache-2.0
"""Which architectures the transformers implementation has: one table.

It drives ``--model-impl auto``, what is refused, the classes of ``rbln_vllm.optimum``, the tables
in the documentation and the tests. Imports neither torch nor Transformers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from rbln_vllm.devices import Family


class Task(StrEnum):
    """What a model is asked for."""

    GENERATE = "generate"
    EMBED = "embed"
    TOKEN_EMBED = "token_embed"
    CLASSIFY = "classify"
    SCORE = "score"


POOLING_TASKS = frozenset(Task) - {Task.GENERATE}


_ALL = frozenset(Family)
_NOT_REBEL100 = frozenset({Family.HOST, Family.ATOM})


@dataclass(frozen=True)
class Architecture:
    """One row: ``name`` as in a checkpoint's ``architectures``.

    ``model_type`` is Transformers' name of it, whose module holds the classes unless ``code`` names
    another. ``devices`` are the families for which it is promised. ``encoder``: its tokens see
    those after them too. ``refusal`` says, in words, why it cannot be served yet; empty for what
    can be.
    """

    name: str
    model_type: str
    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    devices: frozenset[Family] = _ALL
    notes: str = ""
    encoder: bool = False
    refusal: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        if not self.tasks or not self.devices:
            raise ValueError(f"{self.name}: no task or no device")

    @property
    def class_name(self) -> str:
        """The class in ``rbln_vllm.optimum``."""
        return f"RBLN{self.name}"

    @property
    def module(self) -> str:
        """Where its modules are."""
        return self.code or f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def is_built(self) -> bool:
        return not self.refusal

    @property
    def only_pools(self) -> bool:
        """Whether it generates no text."""
        return Task.GENERATE not in self.tasks

    @property
    def classifies(self) -> bool:
        """Whether it ends in a classifier."""
        return Task.CLASSIFY in self.tasks

    def fits(self, tasks: Collection[Task]) -> bool:
        """Whether a model is compiled as this one for any of ``tasks``: what also generates text is
        compiled to do so."""
        return bool(self.tasks.intersection(tasks)) and (self.only_pools or Task.GENERATE in tasks)


_REMOTE = (
    "its modules are not part of Transformers, and modules from elsewhere are not built yet: use "
    "--model-impl vllm"
)
_EMBEDS = frozenset({Task.EMBED, Task.TOKEN_EMBED})
_CLASSIFIES = frozenset({Task.CLASSIFY, Task.SCORE})


def _encoder(name: str, model_type: str, tasks: frozenset[Task], notes: str = "") -> Architecture:
    return Architecture(name, model_type, tasks, _NOT_REBEL100, notes, encoder=True)


_ROWS = (
    Architecture("LlamaForCausalLM", "llama"),
    Architecture("MistralForCausalLM", "mistral", notes="sliding windows"),
    Architecture("Qwen2ForCausalLM", "qwen2", notes="biases in attention"),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        tasks=frozenset({Task.GENERATE, Task.EMBED}),
        notes="norms of queries and keys; embeds with `--runner pooling`",
    ),
    Architecture("GemmaForCausalLM", "gemma", notes="scaled embeddings"),
    Architecture("Gemma2ForCausalLM", "gemma2", notes="soft caps; a window in every second layer"),
    Architecture("PhiForCausalLM", "phi", notes="partial rotary; attention beside the MLP"),
    Architecture("OPTForCausalLM", "opt", notes="learned positions"),
    Architecture("GPT2LMHeadModel", "gpt2", notes="learned positions; tied head"),
    Architecture(
        "Exaone4ForCausalLM", "exaone4", notes="windows with rotary, full attention without"
    ),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", devices=_NOT_REBEL100, notes="experts"),
    Architecture("GptOssForCausalLM", "gpt_oss", notes="attention sinks; windows; experts"),
    Architecture(
        "ExaoneForCausalLM",
        "exaone",
        notes="EXAONE 3 and 3.5: Llama's modules; the checkpoint's own code is not run",
        code="rbln_vllm.models.transformers.exaone",
    ),
    _encoder("BertModel", "bert", _EMBEDS),
    _encoder("RobertaModel", "roberta", _EMBEDS),
    _encoder("XLMRobertaModel", "xlm_roberta", _EMBEDS),
    _encoder("BertForSequenceClassification", "bert", _CLASSIFIES),
    _encoder("RobertaForSequenceClassification", "roberta", _CLASSIFIES),
    _encoder("XLMRobertaForSequenceClassification", "xlm_roberta", _CLASSIFIES),
    Architecture(
        "Qwen3Model", "qwen3", frozenset({Task.EMBED}), _NOT_REBEL100, "pools the last token"
    ),
    Architecture(
        "Qwen3ForSequenceClassification",
        "qwen3",
        _CLASSIFIES,
        _NOT_REBEL100,
        "pools the last token; serves Qwen3-Reranker through `--hf-overrides`",
    ),
    Architecture("MidmLMHeadModel", "midm", refusal=_REMOTE),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.name: row for row in _ROWS})
"""Every architecture by name, those that are refused among them."""


def built(*tasks: Task) -> tuple[str, ...]:
    """Names of the architectures that can be served, for one of ``tasks`` if any are given."""
    return tuple(
        row.name for row in _ROWS if row.is_built and (not tasks or row.tasks & set(tasks))
    )


def is_encoder(names: Collection[str]) -> bool:
    """Whether the first name that is known is an encoder's."""
    known = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    return known is not None and known.encoder


def check_architecture(names: Collection[str], *tasks: Task) -> Architecture:
    """The row of the first name that is known; ``tasks`` are those of which it must have one.

    Raises ValueError when none of a model's architectures can be served, or not for such a task,
    listing those that can.
    """
    known = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if known is not None and known.is_built:
        if tasks and not known.tasks & set(tasks):
            raise ValueError(
                f"{known.name} is not built for {' or '.join(tasks)}: use a model of "
                f"{', '.join(built(*tasks))}"
            )
        return known
    if known is not None:
        raise ValueError(f"{known.name}: {known.refusal}")
    raise ValueError(
        f"the transformers implementation has nothing for {', '.join(names) or 'this model'}: "
        f"use --model-impl vllm, or a model of {', '.join(built())}"
    )
