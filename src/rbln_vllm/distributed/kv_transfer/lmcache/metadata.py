# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side tells the worker's, every step."""

from dataclasses import dataclass, field

from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata


@dataclass
class StepOrders(LMCacheConnectorMetadata):
    """LMCache's loads and saves, and what it does not think of.

    ``abandoned`` are requests that ended after they were looked up and before they ran: their
    chunks are still pinned. ``recovered`` are blocks that could not be loaded, of which all who
    need them have been told. ``clear`` drops everything that is stored, before any load.
    """

    abandoned: list[str] = field(default_factory=list)
    recovered: set[int] = field(default_factory=set)
    clear: bool = False
