# SPDX-License-Identifier: Apache-2.0
"""As which architecture a model is compiled: its own, or the one that was asked for.

A checkpoint of a language model also embeds, and one that was trained to fill in masks is read by
its bare layers: what Transformers' classes load across architectures, ours do too.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rbln_vllm.models.architectures import (
    ARCHITECTURES,
    POOLING_TASKS,
    Architecture,
    Task,
    check_architecture,
)


@dataclass(frozen=True)
class Wanted:
    """What was asked for: the architecture ``name``, or any one for ``tasks``; or neither."""

    name: str = ""
    tasks: frozenset[Task] = frozenset()


ANYTHING = Wanted()
"""What a model is, nobody says: it is compiled for what it was made for."""
RUNNERS = {
    "auto": ANYTHING,
    "generate": Wanted(tasks=frozenset({Task.GENERATE})),
    "pooling": Wanted(tasks=POOLING_TASKS),
}
"""By the names of vLLM's ``--runner``."""


def choose_architecture(config: Any, wanted: Wanted, *, embeds: bool) -> Architecture:
    """The row of a model's configuration; ``embeds`` says that it is a Sentence-Transformers model.

    Where a class was asked for that cannot be had of this model, it is the model's own; the caller
    compares. Warns of a row that is not the model's own. ValueError, listing what there is, when
    there is none.
    """
    names = architectures_of(config)
    if wanted.name in names:
        return check_architecture([wanted.name])
    row = _other_row(config, names, wanted, embeds)
    if row is None:
        return check_architecture(names, *sorted(wanted.tasks))
    warnings.warn(
        f"the model is of {', '.join(names) or 'no architecture'} and is compiled as {row.name}",
        stacklevel=2,
    )
    return row


def architectures_of(config: Any) -> Sequence[str]:
    return tuple(getattr(config, "architectures", None) or ())


def _other_row(
    config: Any, names: Sequence[str], wanted: Wanted, embeds: bool
) -> Architecture | None:
    """A row that is not the model's own; None where its own will do or no other is known."""
    own = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    if wanted.name:
        asked = ARCHITECTURES.get(wanted.name)
        return asked if asked is not None and _can_be(asked, config) else None
    tasks = wanted.tasks or (frozenset({Task.EMBED}) if embeds else frozenset())
    if not tasks or any(row.fits(tasks) for row in own):
        return None
    if not wanted.tasks and any(row.only_pools for row in own):
        return None  # a classifier, say, that was made of a Sentence-Transformers model
    return next((row for row in _pooling_rows(tasks) if _can_be(row, config)), None)


def _pooling_rows(tasks: Collection[Task]) -> list[Architecture]:
    return [row for row in ARCHITECTURES.values() if row.only_pools and row.fits(tasks)]


def _can_be(row: Architecture, config: Any) -> bool:
    """Whether a model has the layers of this row; a language model's head would be missing."""
    model_type = str(getattr(config, "model_type", "")).replace("-", "_")
    return row.is_built and row.only_pools and row.model_type == model_type
