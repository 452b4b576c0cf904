# SPDX-License-Identifier: Apache-2.0
"""The classes of the ahead-of-time API, made from the table of architectures."""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from rbln_vllm.models.architectures import ARCHITECTURES, Task
from rbln_vllm.optimum.model import RBLNModelForCausalLM
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.request import request_of

PACKAGE = "rbln_vllm.optimum"

BASES: Mapping[Task, type[RBLNModelForCausalLM]] = MappingProxyType(
    {Task.GENERATE: RBLNModelForCausalLM}
)
"""What a class of the API can do, by the task of its architecture."""


class RBLNAutoModelForCausalLM:
    """Chooses the class by the model's architecture; has no instances of its own."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError(
            "RBLNAutoModelForCausalLM is made by RBLNAutoModelForCausalLM.from_pretrained(model)"
        )

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | Path,
        export: bool | None = None,
        rbln_config: RBLNModelConfig | Mapping[str, Any] | None = None,
        *,
        model_save_dir: str | Path | None = None,
        **keywords: Any,
    ) -> RBLNModelForCausalLM:
        """As :meth:`RBLNModelForCausalLM.from_pretrained` of the model's own class."""
        request = request_of(model_id, export, rbln_config, model_save_dir, keywords)
        return model_class(request.class_name)(request.open())


@functools.cache
def model_class(name: str) -> type[RBLNModelForCausalLM]:
    """The class of this name. AttributeError when no architecture that is built has it."""
    for row in ARCHITECTURES.values():
        if row.class_name != name or not row.is_built:
            continue
        base = next((BASES[task] for task in sorted(row.tasks) if task in BASES), None)
        if base is not None:
            document = f"{row.name}, compiled. {row.notes}".rstrip()
            return type(name, (base,), {"__module__": PACKAGE, "__doc__": document})
    raise AttributeError(f"there is no class {name} in {PACKAGE}")
