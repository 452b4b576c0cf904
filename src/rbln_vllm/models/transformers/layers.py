# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model keep keys and values, found by asking the model."""

import torch
from transformers import PreTrainedModel

from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.models.transformers.attention import LayerProbe, SeenLayer


def attention_layers(model: PreTrainedModel) -> tuple[KVLayer, ...]:
    """The attention layers in order; ``model`` is on the meta device and computes nothing.

    Raises NotImplementedError for layers that programs cannot hold.
    """
    probe = LayerProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        # The mask keeps models from looking for padding among ids that have no values.
        model.base_model(
            input_ids=token,
            position_ids=token,
            attention_mask=torch.ones_like(token),
            use_cache=False,
            paged=probe,
        )
    if sorted(probe.seen) != list(range(len(probe.seen))) or not probe.seen:
        raise NotImplementedError(
            f"{type(model).__name__} attends in the layers {sorted(probe.seen)}; only models in "
            "which every layer does are built"
        )
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(_kv_layer(names, probe.seen[index]) for index in range(len(probe.seen)))


def _kv_layer(names: dict[int, str], seen: SeenLayer) -> KVLayer:
    return KVLayer(
        name=names[id(seen.module)],
        num_heads=seen.num_heads,
        num_kv_heads=seen.num_kv_heads,
        head_size=seen.head_size,
        dtype=str(seen.dtype).removeprefix("torch."),
        window=seen.window,
    )
