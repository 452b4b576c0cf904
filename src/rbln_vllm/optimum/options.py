# SPDX-License-Identifier: Apache-2.0
"""Options of a compiled model: optimum-rbln's names, in the three forms in which they come."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, InstanceOf, PositiveInt

from rbln_vllm.config.overrides import CompileOverrides
from rbln_vllm.lora.config import RBLNLoRAConfig

PREFIX = "rbln_"
RUNTIME = ("create_runtimes",)
"""Options of the process that loads a model; they are no part of what is compiled."""


class RBLNModelConfig(CompileOverrides):
    """What a model is compiled for; None where the model or the device decides.

    ``batch_size`` is 1 when not given, ``max_seq_len`` the model's own longest sequence.
    """

    LABEL: ClassVar[str] = "rbln_config"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "dtype": "dtype is an argument of from_pretrained, without the prefix rbln_"
    }

    num_speculative_tokens: Annotated[
        PositiveInt | None,
        Field(
            description="Drafts that a decode step may verify: what the methods ngram and suffix "
            "of --speculative-config need."
        ),
    ] = None
    npu: Annotated[
        str | None, Field(description="The device whose limits apply; None: as the environment.")
    ] = None
    lora_config: Annotated[
        InstanceOf[RBLNLoRAConfig] | None,
        Field(description="Adapters that are compiled in, and their largest rank."),
    ] = None
    create_runtimes: Annotated[
        bool, Field(description="Off: compile only, the model cannot be run.")
    ] = True

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """As of the engine's overrides; NotImplementedError for adapters with a bias."""
        if entries.get("lora_config") is not None:
            entries = {**entries, "lora_config": RBLNLoRAConfig.of(entries["lora_config"])}
        return super().of(entries)

    @classmethod
    def merged(
        cls, rbln_config: "RBLNModelConfig | Mapping[str, Any] | None", keywords: Mapping[str, Any]
    ) -> Self:
        """``rbln_config`` with the keywords ``rbln_<option>`` laid over it.

        ValueError for unknown options and values that cannot be, TypeError for another type.
        """
        if rbln_config is not None and not isinstance(rbln_config, RBLNModelConfig | Mapping):
            raise TypeError(
                "rbln_config must be a RBLNModelConfig or a mapping of its options, not "
                f"{type(rbln_config).__name__}"
            )
        given = given_options(rbln_config) if rbln_config is not None else {}
        return cls.of({**given, **{k.removeprefix(PREFIX): v for k, v in keywords.items()}})


def given_options(config: RBLNModelConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The options that somebody gave."""
    if isinstance(config, RBLNModelConfig):
        return {name: getattr(config, name) for name in sorted(config.model_fields_set)}
    return dict(config)


def split_keywords(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords for us, which begin with ``rbln_``, and those for Hugging Face."""
    ours = {name: value for name, value in keywords.items() if name.startswith(PREFIX)}
    return ours, {name: value for name, value in keywords.items() if name not in ours}
