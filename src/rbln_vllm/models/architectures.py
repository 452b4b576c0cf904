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


_ALL = frozenset(Family)
_NOT_REBEL100 = frozenset({Family.HOST, Family.ATOM})


@dataclass(frozen=True)
class Architecture:
    """One row: ``name`` as in a checkpoint's ``architectures``.

    ``model_type`` is Transformers' name of it, whose module holds the classes unless ``code`` names
    another. ``devices`` are the families for which it is promised. ``refusal`` says, in words, why
    it cannot be served yet; empty for what can be.
    """

    name: str
    model_type: str
    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    devices: frozenset[Family] = _ALL
    notes: str = ""
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


_REMOTE = (
    "its modules are not part of Transformers, and modules from elsewhere are not built yet: use "
    "--model-impl vllm"
)

_ROWS = (
    Architecture("LlamaForCausalLM", "llama"),
    Architecture("MistralForCausalLM", "mistral", notes="sliding windows"),
    Architecture("Qwen2ForCausalLM", "qwen2", notes="biases in attention"),
    Architecture("Qwen3ForCausalLM", "qwen3", notes="norms of queries and keys"),
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
    Architecture("MidmLMHeadModel", "midm", refusal=_REMOTE),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.name: row for row in _ROWS})
"""Every architecture by name, those that are refused among them."""


def built() -> tuple[str, ...]:
    """Names of the architectures that can be served."""
    return tuple(row.name for row in _ROWS if row.is_built)


def check_architecture(names: Collection[str]) -> Architecture:
    """The row of the first name that is known.

    Raises ValueError when none of a model's architectures can be served, listing those that can.
    """
    known = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if known is not None and known.is_built:
        return known
    if known is not None:
        raise ValueError(f"{known.name}: {known.refusal}")
    raise ValueError(
        f"the transformers implementation has nothing for {', '.join(names) or 'this model'}: "
        f"use --model-impl vllm, or a model of {', '.join(built())}"
    )
