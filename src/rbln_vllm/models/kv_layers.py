# SPDX-License-Identifier: Apache-2.0
"""What the KV pool must hold for a model's attention layers.

Recorded in the artifact, so that a warm start can size and bind the pool without the model.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class KVLayer:
    """One attention layer: its name, geometry and dtype; ``window`` in tokens, 0 for none."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    window: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.name}: heads must be a multiple of KV heads")

    @classmethod
    def from_spec(cls, name: str, num_heads: int, spec: "KVCacheSpec") -> "KVLayer":
        """Raises NotImplementedError for a cache that is not paged attention."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise NotImplementedError(
                f"layer {name} needs a {type(spec).__name__}, which is not built yet; "
                "only full and sliding-window attention are"
            )
        assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
        return cls(
            name=name,
            num_heads=num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=str(spec.dtype).removeprefix("torch."),
            window=spec.sliding_window or 0,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def spec(self, block_size: int) -> "KVCacheSpec":
        """The pool's layout for this layer, in vLLM's terms."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        common: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": self.torch_dtype,
        }
        if self.window:
            return SlidingWindowSpec(**common, sliding_window=self.window)
        return FullAttentionSpec(**common)

    def block_shape(self, block_size: int) -> tuple[int, int, int]:
        """Shape of one block: ``[num_kv_heads, block_size, 2 * head_size]``."""
        return (self.num_kv_heads, block_size, 2 * self.head_size)


def kv_input_name(index: int) -> str:
    """Name of the program input that is layer ``index``'s part of the pool."""
    return f"kv_{index}"


def layers_to_json(layers: tuple[KVLayer, ...]) -> list[dict[str, Any]]:
    """For the artifact's manifest."""
    return [asdict(layer) for layer in layers]


def layers_from_json(items: list[dict[str, Any]]) -> tuple[KVLayer, ...]:
    """The inverse; TypeError or ValueError when the manifest holds something else."""
    return tuple(KVLayer(**item) for item in items)


def block_bytes(layers: Iterable[KVLayer], block_size: int) -> int:
    """Bytes of one block over all layers."""
    return sum(prod(layer.block_shape(block_size)) * layer.torch_dtype.itemsize for layer in layers)
