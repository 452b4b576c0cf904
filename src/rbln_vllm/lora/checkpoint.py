# SPDX-License-Identifier: Apache-2.0
"""Reading an adapter from disk, and the checks that it fits the model and the programs."""

from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path

from rbln_vllm.lora.fit import AdapterError, check_fit
from rbln_vllm.lora.peft_files import CONFIG_FILE, check_settings, wrong_rank
from rbln_vllm.lora.slots import LowRank
from rbln_vllm.lora.stored import StoredAdapters
from rbln_vllm.toolchain import Adapters

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models.utils import WeightsMapper


def load_adapter(
    request: "LoRARequest",
    config: "LoRAConfig",
    adapters: Adapters,
    mapper: "WeightsMapper | None" = None,
) -> LoRAModel:
    """The adapter that a request names, as it is stored.

    ``mapper`` turns the names of Hugging Face's modules into the model's own. Raises
    LoRAAdapterNotFoundError when its files are not there, AdapterError for an adapter that does
    not fit.
    """
    path, name = get_adapter_absolute_path(request.lora_path), request.lora_name
    if not (Path(path) / CONFIG_FILE).is_file():
        raise LoRAAdapterNotFoundError(name, request.lora_path)
    check_settings(name, Path(path))
    try:
        settings = PEFTHelper.from_local_dir(path, None)
        settings.validate_legal(config)
        model = LoRAModel.from_local_checkpoint(
            path,
            _last_names(adapters),
            settings,
            lora_model_id=request.lora_int_id,
            device="cpu",
            weights_mapper=mapper,
        )
    except FileNotFoundError as error:
        raise LoRAAdapterNotFoundError(name, request.lora_path) from error
    except (ValueError, RuntimeError, TypeError, safetensors.SafetensorError) as error:
        raise AdapterError(f"adapter {name!r} ({path}): {error}{_advice(str(error))}") from error
    _check(name, model, adapters)
    return model


class NotCompiledInError(LoRAAdapterNotFoundError):
    """Neither compiled in nor on disk; says which are."""

    def __init__(self, request: "LoRARequest", stored: StoredAdapters) -> None:
        super().__init__(request.lora_name, request.lora_path)
        # vLLM's server knows its own error by how its text begins.
        self.message += (
            f". Compiled in are {stored.listed}, by their names; Invalid `lora_int_id` "
            f"{request.lora_int_id} of any other"
        )


def stored_adapter(request: "LoRARequest", stored: StoredAdapters) -> LoRAModel:
    """The adapter of a request's name out of a compiled directory; its path is not looked at.

    AdapterError for one that does not fit.
    """
    parts = stored.parts(request.lora_name)
    weights = {
        name: LoRALayerWeights(name, part.rank, part.rank, part.a_RK, part.b_OR, part.scale)
        for name, part in parts.items()
    }
    rank = max(part.rank for part in parts.values())
    return LoRAModel(request.lora_int_id, rank, weights)


def parts_of(model: LoRAModel) -> dict[str, LowRank]:
    """By module: what the adapter does there."""
    return {
        name: LowRank(weights.lora_a, weights.lora_b, weights.scaling)
        for name, weights in model.loras.items()
    }


def _advice(error: str) -> str:
    if "max_lora_rank" in error:
        return " Raise --max-lora-rank."
    if "expected target modules" in error or "while loading" in error.lower():
        return ". Save the adapter for linears that this model has."
    return ""


def _last_names(adapters: Adapters) -> set[str]:
    return {module.name.rsplit(".", 1)[-1] for module in adapters.modules}


def _check(name: str, model: LoRAModel, adapters: Adapters) -> None:
    if model.modules_to_save:
        raise AdapterError(
            f"adapter {name!r} replaces whole modules ({', '.join(model.modules_to_save)}), which "
            "programs cannot: train it without modules_to_save"
        )
    matrices = {module: (part.lora_a, part.lora_b) for module, part in model.loras.items()}
    check_fit(name, matrices, adapters)
    for module, part in model.loras.items():
        if part.rank != part.lora_a.shape[0]:
            raise wrong_rank(name, module, part.lora_a.shape[0], part.rank)
