# SPDX-License-Identifier: Apache-2.0
"""Reading an adapter from disk, and the checks that it fits the model and the programs."""

import json
from collections.abc import Collection
from typing import TYPE_CHECKING

import safetensors
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path

from rbln_vllm.lora.slots import LowRank
from rbln_vllm.toolchain import AdaptedModule, Adapters

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models.utils import WeightsMapper

_SHOWN = 3


class AdapterError(ValueError):
    """An adapter that cannot be served; says why and what to change."""


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
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LoRAAdapterNotFoundError(name, request.lora_path) from error
    except json.JSONDecodeError as error:
        raise AdapterError(f"adapter {name!r}: adapter_config.json is no JSON: {error}") from error
    except (ValueError, RuntimeError, TypeError, safetensors.SafetensorError) as error:
        raise AdapterError(f"adapter {name!r} ({path}): {error}{_advice(str(error))}") from error
    _check(name, model, adapters)
    return model


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
        return " Save the adapter for linears that this model has."
    return ""


def _last_names(adapters: Adapters) -> set[str]:
    return {module.name.rsplit(".", 1)[-1] for module in adapters.modules}


def _check(name: str, model: LoRAModel, adapters: Adapters) -> None:
    if not model.loras:
        raise AdapterError(
            f"adapter {name!r} has no LoRA weights: save it with PEFT's save_pretrained"
        )
    if model.modules_to_save:
        raise AdapterError(
            f"adapter {name!r} replaces whole modules ({', '.join(model.modules_to_save)}), which "
            "programs cannot: train it without modules_to_save"
        )
    _check_names(name, model.loras, adapters)
    modules = {module.name: module for module in adapters.adapted}
    for module_name, weights in model.loras.items():
        _check_weights(name, weights, modules[module_name], adapters.rank)


def _check_names(name: str, found: Collection[str], adapters: Adapters) -> None:
    unknown = sorted(set(found) - adapters.places.keys())
    if not unknown:
        return
    untargeted = {module.name for module in adapters.modules if not module.is_adapted}
    if set(unknown) <= untargeted:
        raise AdapterError(
            f"adapter {name!r} changes {_list(unknown)}, which --lora-target-modules leaves out: "
            "add them there"
        )
    raise AdapterError(
        f"adapter {name!r} changes {_list(unknown)}, which this model has not as an adaptable "
        f"linear; it has {_list(sorted(adapters.places))}. Save the adapter for this model's "
        "linears and under their names; embeddings and the output head cannot be adapted"
    )


def _check_weights(name: str, weights: LoRALayerWeights, module: AdaptedModule, most: int) -> None:
    where = f"adapter {name!r}, {module.name}"
    if weights.lora_a is None or weights.lora_b is None:
        raise AdapterError(f"{where}: lora_A or lora_B is missing from its weights")
    a, b = tuple(weights.lora_a.shape), tuple(weights.lora_b.shape)
    rank = a[0] if a else 0
    if a != (rank, module.in_features) or b != (module.out_features, rank) or not rank:
        raise AdapterError(
            f"{where}: lora_A is {a} and lora_B {b}, but this linear takes (r, "
            f"{module.in_features}) and ({module.out_features}, r): the adapter was made for "
            "another model"
        )
    if rank > most:
        raise AdapterError(f"{where}: rank {rank} is above {most}: raise --max-lora-rank")


def _list(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
