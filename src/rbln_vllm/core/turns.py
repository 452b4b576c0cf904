# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: the next prefill chunk or the decode batch.

Pure policy, free of vLLM. A step is never both, so every step is a choice between the time
to the first token of the requests that still prefill and the time between tokens of the
requests that decode.
"""

from dataclasses import dataclass
from enum import Enum


class Turn(Enum):
    """What one call of the scheduler tries to run."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"


@dataclass(frozen=True)
class Runnable:
    """What could run in the next step.

    ``prefill``: a running request has a next chunk, or a waiting one may be admitted.
    ``decode``: at least one running request has exactly one token to compute.
    """

    prefill: bool
    decode: bool


@dataclass(frozen=True)
class TurnPolicy:
    """Prefill first, but at most ``max_prefill_run`` prefill steps in a row while decodes wait.

    0 means unbounded: waiting prefills always go first.
    """

    max_prefill_run: int

    def __post_init__(self) -> None:
        if self.max_prefill_run < 0:
            raise ValueError(
                f"max_prefill_run must be 0 (unbounded) or positive, got {self.max_prefill_run}"
            )

    def choose(self, runnable: Runnable, prefill_run: int) -> Turn:
        """Names the turn, given ``prefill_run`` prefill steps since decodes last had theirs."""
        if not runnable.prefill:
            return Turn.DECODE if runnable.decode else Turn.IDLE
        if runnable.decode and self._is_spent(prefill_run):
            return Turn.DECODE
        return Turn.PREFILL

    def count(self, turn: Turn, decodes_waited: bool, prefill_run: int) -> int:
        """Returns the run length after a step of ``turn`` has been scheduled."""
        if turn is Turn.IDLE:
            return prefill_run
        return prefill_run + 1 if turn is Turn.PREFILL and decodes_waited else 0

    def _is_spent(self, prefill_run: int) -> bool:
        return 0 < self.max_prefill_run <= prefill_run
