# SPDX-License-Identifier: Apache-2.0
"""The classes of the ahead-of-time API, made from the table of architectures."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from rbln_vllm.models.architectures import ARCHITECTURES, Architecture, Task
from rbln_vllm.optimum.base import RBLNModel
from rbln_vllm.optimum.choice import Wanted
from rbln_vllm.optimum.model import RBLNModelForCausalLM
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.pooling import (
    RBLNModelForFeatureExtraction,
    RBLNModelForSequenceClassification,
)
from rbln_vllm.optimum.request import request_of

PACKAGE = "rbln_vllm.optimum"


class _AutoModel:
    """Chooses the class by the model's architecture; has no instances of its own."""

    TASKS: ClassVar[frozenset[Task]]

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        name = type(self).__name__
        raise OSError(f"{name} is made by {name}.from_pretrained(model)")

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | Path,
        export: bool | None = None,
        rbln_config: RBLNModelConfig | Mapping[str, Any] | None = None,
        *,
        model_save_dir: str | Path | None = None,
        **keywords: Any,
    ) -> Any:
        """As :meth:`RBLNModel.from_pretrained` of the model's own class.

        ValueError for a model that is of none of this class's tasks.
        """
        wanted = Wanted(tasks=cls.TASKS)
        request = request_of(model_id, export, rbln_config, model_save_dir, keywords, wanted=wanted)
        row = request.architecture
        if not row.fits(cls.TASKS):
            raise ValueError(
                f"{model_id} was compiled for {row.class_name}, which {cls.__name__} does not "
                "make: use that class"
            )
        return model_class(row.class_name)(request.open())


class RBLNAutoModel(_AutoModel):
    """Models without a head, for their hidden states."""

    TASKS = frozenset({Task.EMBED})


class RBLNAutoModelForTextEncoding(RBLNAutoModel):
    """The same, under the name that Transformers has for encoders of text."""


class RBLNAutoModelForCausalLM(_AutoModel):
    """Models that generate text."""

    TASKS = frozenset({Task.GENERATE})


class RBLNAutoModelForSequenceClassification(_AutoModel):
    """Models that classify or score."""

    TASKS = frozenset({Task.CLASSIFY})


@functools.cache
def model_class(name: str) -> type[RBLNModel]:
    """The class of this name. AttributeError when no architecture that is built has it."""
    for row in ARCHITECTURES.values():
        if row.class_name == name and row.is_built:
            document = f"{row.name}, compiled. {row.notes}".rstrip()
            return type(name, (_base(row),), {"__module__": PACKAGE, "__doc__": document})
    raise AttributeError(f"there is no class {name} in {PACKAGE}")


def _base(row: Architecture) -> type[RBLNModel]:
    """What a class of the API can do, by the tasks of its architecture."""
    if not row.only_pools:
        return RBLNModelForCausalLM
    return RBLNModelForSequenceClassification if row.classifies else RBLNModelForFeatureExtraction
