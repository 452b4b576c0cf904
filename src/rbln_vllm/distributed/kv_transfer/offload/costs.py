# SPDX-License-Identifier: Apache-2.0
"""Is it quicker to load stored KV or to compute it again? Answered from measurements."""

from dataclasses import dataclass, field
from enum import Enum

DECAY = 0.8
"""Weight of what was measured before, at each new measurement."""
PROBE_EVERY = 16
"""Of the loads judged too slow, every so many is made all the same, to measure anew."""


class Tier(Enum):
    """Where a stored block lies."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass
class Rate:
    """Amount per second over the recent measurements, each weighted by its duration."""

    _amount: float = 0.0
    _seconds: float = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        self._amount = DECAY * self._amount + amount
        self._seconds = DECAY * self._seconds + seconds

    def per_second(self) -> float | None:
        """None before the first measurement."""
        return self._amount / self._seconds if self._seconds else None

    def seconds_for(self, amount: float) -> float | None:
        rate = self.per_second()
        return None if rate is None else amount / rate


@dataclass(frozen=True)
class Comparison:
    """Seconds to load against seconds to compute; None where nothing was measured yet."""

    load: float | None
    compute: float | None

    @property
    def load_is_cheaper(self) -> bool:
        """Also where a number is missing: loading is how it is measured."""
        return self.load is None or self.compute is None or self.load < self.compute


@dataclass
class Costs:
    """Rates as this engine sees them: a load waits for its turn, a prefill shares the machine."""

    prefill: Rate = field(default_factory=Rate)
    """Tokens per second."""
    loads: dict[Tier, Rate] = field(default_factory=lambda: {tier: Rate() for tier in Tier})
    """Bytes per second: memory to pool, disk to memory."""
    _declined: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    def compare(self, tier: Tier, tokens: int, num_bytes: int) -> Comparison:
        """``tokens`` of ``num_bytes`` in ``tier``. What lies on disk passes through memory."""
        seconds = [self.loads[Tier.MEMORY].seconds_for(num_bytes)]
        if tier is Tier.DISK:
            seconds.append(self.loads[tier].seconds_for(num_bytes))
        known = [value for value in seconds if value is not None]
        return Comparison(sum(known) if known else None, self.prefill.seconds_for(tokens))

    def worth_loading(self, tier: Tier, comparison: Comparison) -> bool:
        """The comparison's answer, except for a load now and then that keeps the rate fresh."""
        if comparison.load_is_cheaper:
            return True
        self._declined[tier] += 1
        return self._declined[tier] % PROBE_EVERY == 0
