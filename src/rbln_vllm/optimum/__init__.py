# SPDX-License-Identifier: Apache-2.0
"""The ahead-of-time API: compile Hugging Face models, save them, run them.

::

    from rbln_vllm.optimum import RBLNAutoModelForCausalLM

    model = RBLNAutoModelForCausalLM.from_pretrained("MODEL", rbln_batch_size=4)
    model.save_pretrained("DIRECTORY")  # then: vllm serve DIRECTORY

There is a class ``RBLN<architecture>`` for every architecture of the transformers implementation.
Names are looked up when they are first used: to import this package costs nothing.
"""

from typing import Any

from rbln_vllm.models.architectures import ARCHITECTURES

MODEL_CLASSES = tuple(row.class_name for row in ARCHITECTURES.values() if row.is_built)
"""``RBLN<architecture>`` of every architecture that is built."""
AUTO_CLASSES = (
    "RBLNAutoModel",
    "RBLNAutoModelForCausalLM",
    "RBLNAutoModelForSequenceClassification",
    "RBLNAutoModelForTextEncoding",
)
"""Those that choose one of ``MODEL_CLASSES`` by the model."""

__all__ = [  # noqa: PLE0604 (names of classes that are made when they are first asked for)
    "AUTO_CLASSES",
    "MODEL_CLASSES",
    "RBLNLoRAAdapterConfig",
    "RBLNLoRAConfig",
    "RBLNModelConfig",
    "RBLNModelForCausalLM",
    "RBLNModelForFeatureExtraction",
    "RBLNModelForSequenceClassification",
    *AUTO_CLASSES,
    *MODEL_CLASSES,
]


def __getattr__(name: str) -> Any:
    if name == "RBLNModelConfig":
        from rbln_vllm.optimum.options import RBLNModelConfig

        return RBLNModelConfig
    if name in ("RBLNLoRAAdapterConfig", "RBLNLoRAConfig"):
        from rbln_vllm.lora import config

        return getattr(config, name)
    if name.startswith("RBLNAutoModel") and name not in AUTO_CLASSES:
        raise AttributeError(
            f"{name} is not built: the classes that choose by the model are "
            f"{', '.join(AUTO_CLASSES)}"
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rbln_vllm.optimum import classes

    return getattr(classes, name, None) or classes.model_class(name)


def __dir__() -> list[str]:
    return sorted(__all__)
