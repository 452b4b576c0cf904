# SPDX-License-Identifier: Apache-2.0
"""The ahead-of-time API: compile Hugging Face models, save them, generate with them.

::

    from rbln_vllm.optimum import RBLNAutoModelForCausalLM

    model = RBLNAutoModelForCausalLM.from_pretrained("MODEL", rbln_batch_size=4)
    model.save_pretrained("DIRECTORY")  # then: vllm serve DIRECTORY

There is a class ``RBLN<architecture>`` for every architecture of the transformers implementation
that generates text. Names are looked up when they are first used: to import this package costs
nothing.
"""

from typing import Any

from rbln_vllm.models.architectures import ARCHITECTURES, Task

MODEL_CLASSES = tuple(
    row.class_name for row in ARCHITECTURES.values() if row.is_built and Task.GENERATE in row.tasks
)
"""``RBLN<architecture>`` of every architecture that is built."""

__all__ = [  # noqa: PLE0604 (names of classes that are made when they are first asked for)
    "MODEL_CLASSES",
    "RBLNAutoModelForCausalLM",
    "RBLNLoRAAdapterConfig",
    "RBLNLoRAConfig",
    "RBLNModelConfig",
    "RBLNModelForCausalLM",
    *MODEL_CLASSES,
]


def __getattr__(name: str) -> Any:
    if name == "RBLNModelConfig":
        from rbln_vllm.optimum.options import RBLNModelConfig

        return RBLNModelConfig
    if name in ("RBLNLoRAAdapterConfig", "RBLNLoRAConfig"):
        from rbln_vllm.lora import config

        return getattr(config, name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rbln_vllm.optimum import classes

    return getattr(classes, name, None) or classes.model_class(name)


def __dir__() -> list[str]:
    return sorted(__all__)
