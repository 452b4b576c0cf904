# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers that emit one ``rbln::`` operator where its own code emits many.

Registered through vLLM's hook for out-of-tree layers: a class that is built under one of these
names is replaced by a subclass with another ``forward_native``. A layer whose own
``forward_native`` differs from what is replaced here (multi-modal rotary, for one) stays as it is.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import FastGELU, GeluAndMul, NewGELU, SiluAndMul
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)


class FusedRotary(RotaryEmbedding):
    """Rotary embedding as one operator for the query and one for the key."""

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``query`` and ``key`` are ``[N, heads * head_size]`` or ``[N, heads, head_size]``."""
        cos_sin_PR = self._match_cos_sin_cache_dtype(query)
        if positions.dim() != 1 or cos_sin_PR.shape[1] != self.rotary_dim:
            native: tuple[Tensor, Tensor | None] = super().forward_native(positions, query, key)
            return native
        rotated_key = None if key is None else self._rotate(key, positions, cos_sin_PR)
        return self._rotate(query, positions, cos_sin_PR), rotated_key

    def _rotate(self, heads: Tensor, positions_N: Tensor, cos_sin_PR: Tensor) -> Tensor:
        heads_NHD = heads.view(positions_N.shape[0], -1, self.head_size)
        rotated_NHD: Tensor = torch.ops.rbln.rotary_embedding(
            heads_NHD, positions_N, cos_sin_PR, self.is_neox_style
        )
        return rotated_NHD.view(heads.shape)


@CustomOp.register_oot(name=SiluAndMul.__name__)
class FusedSiluAndMul(SiluAndMul):
    """``silu(gate) * up`` of ``[N, 2 * I]``."""

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        gated_NI: Tensor = torch.ops.rbln.gated_activation(x, "silu")
        return gated_NI


@CustomOp.register_oot(name=GeluAndMul.__name__)
class FusedGeluAndMul(GeluAndMul):
    """``gelu(gate) * up`` of ``[N, 2 * I]``, exact or by tanh."""

    def forward_native(self, x: Tensor) -> Tensor:
        activation = "gelu_tanh" if self.approximate == "tanh" else "gelu"
        gated_NI: Tensor = torch.ops.rbln.gated_activation(x, activation)
        return gated_NI


@CustomOp.register_oot(name=NewGELU.__name__)
class FusedNewGELU(NewGELU):
    """GELU by tanh, which vLLM spells out."""

    def forward_native(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")


@CustomOp.register_oot(name=FastGELU.__name__)
class FusedFastGELU(FastGELU):
    """The same function under its other name."""

    def forward_native(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")


def _classes(base: type[RotaryEmbedding]) -> Iterator[type[RotaryEmbedding]]:
    """``base`` and what is derived from it, to any depth."""
    yield base
    for derived in base.__subclasses__():
        yield from _classes(derived)


def _register_rotary() -> None:
    """Scaled variants differ in their table alone, and inherit the forward that is replaced."""
    for base in list(_classes(RotaryEmbedding)):
        if base.forward_native is RotaryEmbedding.forward_native:
            fused = type(f"Fused{base.__name__}", (FusedRotary, base), {})
            CustomOp.register_oot(fused, name=base.__name__)


_register_rotary()
