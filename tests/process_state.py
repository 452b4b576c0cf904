# SPDX-License-Identifier: Apache-2.0
"""State of this process that a test module must leave as it was: the next one would find it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

# What tests set for engines and commands. Others appear with the library that sets them.
_VARIABLES = ("VLLM_", "RBLN_", "HF_", "OMP_", "PYTHON", "XDG_")

State = Mapping[str, Any]


def process_state() -> State:
    """By name. What is not imported yet has none, and is not imported here."""
    state: dict[str, Any] = {
        "environment": {n: v for n, v in os.environ.items() if n.startswith(_VARIABLES)},
        "working directory": os.getcwd(),
        "sys.argv": list(sys.argv),
        "logging.disable": logging.root.manager.disable,
    }
    if "vllm.logger" in sys.modules:
        state["level of vLLM's logger"] = logging.getLogger("vllm").level
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch's default dtype"] = torch.get_default_dtype()
        state["torch's threads"] = torch.get_num_threads()
        state["torch's gradients"] = torch.is_grad_enabled()
    return state


def changes(before: State, after: State) -> list[str]:
    """In words, what of `before` is another now; in mappings item by item."""
    found = []
    for name, old in before.items():
        new = after[name]
        if isinstance(old, dict):
            keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
            found += [f"{name} {key}: {old.get(key)!r}, now {new.get(key)!r}" for key in keys]
        elif old != new:
            found.append(f"{name}: {old!r}, now {new!r}")
    return found
