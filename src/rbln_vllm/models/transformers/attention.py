# SPDX-License-Identifier: Apache-2.0
"""The attention function Hugging Face's modules call: over the step they are given.

A model is called with ``paged=`` one of the steps below, which its layers hand down to the
function. All tokens of a step come as one row, ``[1, N]``; which sequence a token belongs to, and
where its keys are, is the step's affair.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)

ATTENTION = "rbln_paged"
"""Under which the function is registered; a config's ``_attn_implementation``."""


@dataclass(frozen=True)
class Scores:
    """What an architecture's attention does to scores; ``window`` in tokens, 0 for none."""

    scale: float
    window: int
    soft_cap: float
    sinks_H: Tensor | None


class Step(Protocol):
    """What attention is computed over; ``is_causal`` for modules whose tokens see earlier ones."""

    @property
    def is_causal(self) -> bool: ...

    def attend(
        self, module: torch.nn.Module, index: int, qkv_NHD: tuple[Tensor, ...], scores: Scores
    ) -> Tensor:
        """``[N, heads, head_size]`` for query, key and value (fewer heads) of the same form."""
        ...


@dataclass(frozen=True)
class PagedStep:
    """``B`` sequences of ``Q`` queries each, over the pool of every layer.

    ``block_table_BT`` int32 block ids; ``slots_N`` int64 pool slots of the new tokens;
    ``query_pos_N`` int32 positions of the queries.
    """

    kv_caches: tuple[Tensor, ...]
    block_table_BT: Tensor
    slots_N: Tensor
    query_pos_N: Tensor
    is_causal: bool = True

    def attend(
        self, module: torch.nn.Module, index: int, qkv_NHD: tuple[Tensor, ...], scores: Scores
    ) -> Tensor:
        query_NHD, key_NHD, value_NHD = qkv_NHD
        kv_cache = self.kv_caches[index]
        torch.ops.rbln.write_kv(key_NHD, value_NHD, kv_cache, self.slots_N)
        attended_NHD: Tensor = torch.ops.rbln.paged_attention(
            query_NHD,
            kv_cache,
            self.block_table_BT,
            self.query_pos_N,
            scores.scale,
            scores.window,
            scores.soft_cap,
            scores.sinks_H,
            None,
        )
        return attended_NHD


@dataclass(frozen=True)
class WholeStep:
    """Whole sequences, one after another: sequence r has the tokens ``[starts[r], starts[r + 1])``
    of ``row_starts_S`` (int32). Their keys and values are kept nowhere.
    """

    row_starts_S: Tensor
    is_causal: bool = False

    def attend(
        self, module: torch.nn.Module, index: int, qkv_NHD: tuple[Tensor, ...], scores: Scores
    ) -> Tensor:
        """Raises NotImplementedError for a window, a soft cap or sinks."""
        if scores.window or scores.soft_cap or scores.sinks_H is not None:
            raise NotImplementedError(
                f"{type(module).__name__} is an encoder with a window, a soft cap or sinks, which "
                "is not built yet"
            )
        attended_NHD: Tensor = torch.ops.rbln.encoder_attention(
            *qkv_NHD, self.row_starts_S, scores.scale
        )
        return attended_NHD


@dataclass(frozen=True)
class SeenLayer:
    """One layer's attention as its model called it."""

    module: torch.nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    window: int


@dataclass(frozen=True)
class LayerProbe:
    """Computes nothing and notes which layers attend, by their index."""

    seen: dict[int, SeenLayer] = field(default_factory=dict)
    is_causal: bool = True

    def attend(
        self, module: torch.nn.Module, index: int, qkv_NHD: tuple[Tensor, ...], scores: Scores
    ) -> Tensor:
        query_NHD, key_NHD, value_NHD = qkv_NHD
        if index in self.seen:
            raise NotImplementedError(
                f"layer {index} attends twice in one step, which is not built yet"
            )
        if key_NHD.shape != value_NHD.shape or query_NHD.shape[2] != key_NHD.shape[2]:
            raise NotImplementedError(
                "heads of different sizes for query, key and value are not built yet"
            )
        _, heads, size = query_NHD.shape
        self.seen[index] = SeenLayer(
            module, heads, key_NHD.shape[1], size, key_NHD.dtype, scores.window
        )
        return query_NHD


def paged_attention(  # noqa: PLR0917 (Transformers calls it by position)
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: Step | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; ``query``, ``key`` and ``value`` are ``[1, heads, N, head_size]``.

    ``s_aux`` holds one sink logit per head. Returns ``[1, N, heads, head_size]`` and no weights.
    Raises NotImplementedError for attention that no program computes.
    """
    _check(module, attention_mask, paged, others)
    assert paged is not None
    scores = Scores(
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window or 0,
        soft_cap=float(softcap or 0.0),
        sinks_H=s_aux,
    )
    qkv_NHD = tuple(heads[0].transpose(0, 1) for heads in (query, key, value))
    index = int(getattr(module, "layer_idx", -1))
    return paged.attend(module, index, qkv_NHD, scores)[None], None


def _check(
    module: torch.nn.Module, mask: Tensor | None, paged: Step | None, others: dict[str, Any]
) -> None:
    name = type(module).__name__
    if paged is None:
        raise NotImplementedError(f"{name} does not hand the step to its attention function")
    if mask is not None or others.get("position_bias") is not None:
        raise NotImplementedError(f"{name} masks or biases its scores, which is not built yet")
    if bool(getattr(module, "is_causal", True)) != paged.is_causal:
        found = "causal" if paged.is_causal is False else "not causal"
        raise NotImplementedError(f"{name} is {found}, which is not built here yet")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, paged_attention)
