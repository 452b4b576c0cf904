# SPDX-License-Identifier: Apache-2.0
"""A model and a machine whose figures are known."""

from __future__ import annotations

from benchmarks.costs import Limits

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
LIMITS = Limits(bytes_per_s=80e9, flop_per_s=900e9)
