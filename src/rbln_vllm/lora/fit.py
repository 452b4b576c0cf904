# SPDX-License-Identifier: Apache-2.0
"""Whether an adapter's matrices fit the linears that programs were compiled for."""

from collections.abc import Collection, Mapping

from torch import Tensor

from rbln_vllm.toolchain import AdaptedModule, Adapters

Matrices = tuple[Tensor | None, Tensor | None]
"""``A`` and ``B`` of one module, where the adapter has them."""
_SHOWN = 3


class AdapterError(ValueError):
    """An adapter that cannot be used; says why and what to change."""


def check_fit(name: str, matrices: Mapping[str, Matrices], adapters: Adapters) -> None:
    """AdapterError, in words, unless every module is adapted and its matrices have its shapes."""
    if not matrices:
        raise AdapterError(
            f"adapter {name!r} has no LoRA weights: save it with PEFT's save_pretrained"
        )
    _check_names(name, matrices, adapters)
    modules = {module.name: module for module in adapters.adapted}
    for module_name, pair in matrices.items():
        _check_matrices(name, pair, modules[module_name], adapters.rank)


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


def _check_matrices(name: str, matrices: Matrices, module: AdaptedModule, most: int) -> None:
    where = f"adapter {name!r}, {module.name}"
    if matrices[0] is None or matrices[1] is None:
        raise AdapterError(f"{where}: lora_A or lora_B is missing from its weights")
    a, b = tuple(matrices[0].shape), tuple(matrices[1].shape)
    rank = a[0] if a else 0
    if a != (rank, module.in_features) or b != (module.out_features, rank) or not rank:
        raise AdapterError(
            f"{where}: lora_A is {a} and lora_B {b}, but this linear takes (r, "
            f"{module.in_features}) and ({module.out_features}, r): the adapter was made for "
            "another model"
        )
    if rank > most:
        raise AdapterError(f"{where}: rank {rank} is above {most}: raise --max-lora-rank")
    if not all(bool(m.float().isfinite().all()) for m in (matrices[0], matrices[1])):
        raise AdapterError(f"{where}: its weights hold NaN or infinity: train or save it again")


def _list(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
