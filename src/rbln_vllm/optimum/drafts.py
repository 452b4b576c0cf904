# SPDX-License-Identifier: Apache-2.0
"""What vLLM's speculative configuration asks of a model that is compiled ahead of time."""

from collections.abc import Mapping
from typing import Any

METHODS = ("ngram", "suffix")
"""Those whose drafts are made without a model."""


def drafts_of(speculation: Mapping[str, Any]) -> int:
    """The drafts that a step verifies.

    ValueError for a method whose drafter is a model: a compiled directory does not hold it.
    """
    method, drafts = speculation.get("method"), speculation.get("num_speculative_tokens")
    if method not in METHODS:
        raise ValueError(
            f"--speculative-config: drafters that are models ({method!r}) cannot be compiled ahead "
            f"of time yet: use the method {' or '.join(METHODS)}, or serve the model by its name, "
            "whose programs are kept in the compile cache"
        )
    if type(drafts) is not int or drafts < 1:
        raise ValueError(
            f"--speculative-config: num_speculative_tokens {drafts!r} is not a positive number"
        )
    return drafts
