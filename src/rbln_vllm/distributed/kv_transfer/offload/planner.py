# SPDX-License-Identifier: Apache-2.0
"""How much of a request's stored prefix is loaded, and what is left to compute."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from rbln_vllm.distributed.kv_transfer.offload.costs import Comparison, Costs, Tier
from rbln_vllm.distributed.kv_transfer.offload.manager import OffloadManager
from rbln_vllm.distributed.kv_transfer.offload.options import LoadPolicy
from rbln_vllm.distributed.kv_transfer.offload.rate_limit import RateLimit

logger = init_logger("vllm.rbln.offload")

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class ChunkShape:
    """One chunk, the unit of offload: its tokens, hashes and bytes, and its KV cache group."""

    tokens: int
    hashes: int
    num_bytes: int
    group: int


class LoadPlanner:
    """Decides once per admission of a request, so that a load that has begun is not given up."""

    def __init__(
        self, manager: OffloadManager, costs: Costs, policy: LoadPolicy, shape: ChunkShape
    ) -> None:
        self._manager, self._costs, self._policy, self._shape = manager, costs, policy, shape
        self._ends: dict[str, int] = {}
        self._failed: set[str] = set()
        self._lines = RateLimit(SECONDS_BETWEEN_LINES)

    def loadable_tokens(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, computed: int
    ) -> int:
        """Tokens worth loading after the ``computed`` ones the pool holds.

        Of ``num_tokens`` the last is never loaded: it is computed for its logits, and a loaded
        block that is written to again would change under others that read it.
        """
        if request_id in self._failed:
            return 0
        end = self._ends.get(request_id)
        if end is None:
            chunks = min(len(hashes) // self._shape.hashes, (num_tokens - 1) // self._shape.tokens)
            hashes = hashes[: chunks * self._shape.hashes]
            end = self._ends[request_id] = self._decide(request_id, hashes, computed)
        return max(0, end - computed)

    def admitted(self, request_id: str) -> None:
        """The request has its blocks; should it be preempted, its next admission is a new case."""
        self._ends.pop(request_id, None)

    def load_failed(self, request_id: str) -> None:
        """Nothing is loaded for this request any more."""
        self._failed.add(request_id)

    def finished(self, request_id: str) -> None:
        self._ends.pop(request_id, None)
        self._failed.discard(request_id)

    def _decide(self, request_id: str, hashes: Sequence[bytes], computed: int) -> int:
        """Returns the position up to which tokens are loaded."""
        first = computed // self._shape.tokens
        tiers = list(self._stored(request_id, hashes, first))
        if not tiers:
            return computed
        worth = {tier: self._is_worth_it(request_id, tier, tiers.count(tier)) for tier in Tier}
        loaded = 0
        for tier in tiers:
            if not worth[tier]:
                break
            loaded += 1
        return (first + loaded) * self._shape.tokens

    def _stored(self, request_id: str, hashes: Sequence[bytes], first: int) -> Iterator[Tier]:
        """Yields the tier of each stored chunk from ``first`` on, as many as memory can hold."""
        context = ReqContext(request_id)
        for chunk in range(first, len(hashes) // self._shape.hashes):
            tier = self._manager.tier_of(self._key(hashes, chunk), context)
            if tier is None or chunk - first >= self._manager.memory_blocks:
                return
            yield tier

    def _key(self, hashes: Sequence[bytes], chunk: int) -> OffloadKey:
        return make_offload_key(hashes[(chunk + 1) * self._shape.hashes - 1], self._shape.group)

    def _is_worth_it(self, request_id: str, tier: Tier, chunks: int) -> bool:
        if not chunks:
            return False
        tokens = chunks * self._shape.tokens
        comparison = self._costs.compare(tier, tokens, chunks * self._shape.num_bytes)
        loads = self._policy is LoadPolicy.ALWAYS or self._costs.worth_loading(tier, comparison)
        self._log(request_id, tier, tokens, comparison, loads)
        return loads

    def _log(
        self, request_id: str, tier: Tier, tokens: int, comparison: Comparison, loads: bool
    ) -> None:
        if (silent := self._lines.passes()) is None:
            return
        logger.info(
            "KV offload: request %s: %d tokens from %s: loading takes %s, computing %s: they are "
            "%s (%d more decisions since the last line)",
            request_id,
            tokens,
            tier.value,
            _text(comparison.load),
            _text(comparison.compute),
            "loaded" if loads else "computed",
            silent,
        )


def _text(seconds: float | None) -> str:
    return "a time not measured yet" if seconds is None else f"{seconds * 1e3:.1f} ms"
