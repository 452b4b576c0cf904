# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: LMCache's bookkeeping, with what it leaves out."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from rbln_vllm.distributed.kv_transfer.lmcache.metadata import StepOrders
from rbln_vllm.distributed.kv_transfer.lmcache.separation import TAG, request_tags
from rbln_vllm.distributed.kv_transfer.lmcache.token_keys import StableTokenDatabase


class TaggedRequest:
    """A request as LMCache sees it: its own, but with our tags among its ``kv_transfer_params``."""

    def __init__(self, request: Request, tags: Mapping[str, str]) -> None:
        self._request = request
        given = getattr(request.sampling_params, "extra_args", None) or {}
        params = with_tags(given.get("kv_transfer_params"), tags)
        self.sampling_params = SimpleNamespace(extra_args={"kv_transfer_params": params})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def with_tags(configs: Any, tags: Mapping[str, str]) -> dict[str, Any]:
    """A request's LMCache settings with our tags; nobody else may set those."""
    own = configs if isinstance(configs, Mapping) else {}
    return {**{key: value for key, value in own.items() if key != TAG}, **tags}


def with_own_block_ids(output: SchedulerOutput) -> SchedulerOutput:
    """A copy for LMCache, which keeps the lists of a resumed request's blocks and appends to them.

    The worker in the same process keeps those same lists and would find each later block twice.
    """
    cached = output.scheduled_cached_reqs
    copies = [ids and tuple(list(group) for group in ids) for ids in cached.new_block_ids]
    return replace(output, scheduled_cached_reqs=replace(cached, new_block_ids=copies))


class SchedulerSide:
    """Keeps tags, pins and loads of each request straight around LMCache's adapter."""

    def __init__(self, adapter: LMCacheConnectorV1Impl) -> None:
        client = adapter.lookup_client
        if type(client) is not LMCacheLookupClient:
            raise RuntimeError(f"LMCache made no lookup client that we know: {type(client)}")
        client.token_database = StableTokenDatabase(adapter.config, adapter.lmcache_engine_metadata)
        self._adapter, self._client = adapter, client
        self._tags: dict[str, dict[str, str]] = {}
        self._abandoned: list[str] = []
        self._recovered: set[int] = set()
        self._clear = False

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens beyond ``num_computed_tokens`` that can be loaded."""
        tags = self._tags.setdefault(request.request_id, request_tags(request))
        found = self._adapter.get_num_new_matched_tokens(
            TaggedRequest(request, tags), num_computed_tokens
        )
        return found or 0

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """What the worker does around this step."""
        self._correct_resumed(output)
        orders = self._adapter.build_connector_meta(with_own_block_ids(output))
        for request in orders.requests:
            tags = self._tags.get(request.req_id, {})
            request.request_configs = with_tags(request.request_configs, tags) or None
        orders = StepOrders(orders.requests, self._abandoned, self._recovered, self._clear)
        self._abandoned, self._recovered, self._clear = [], set(), False
        return orders

    def finished(self, request: Request) -> None:
        """Forget a request; if it was looked up and never ran, let the worker unpin its chunks."""
        request_id = request.request_id
        looked_up = self._adapter.load_specs.pop(request_id, None) is not None
        if looked_up or self._client.lookup_cache(request_id) != -1:
            self._abandoned.append(request_id)
            self._client.clear_lookup_status(request_id)
        self._tags.pop(request_id, None)

    def recovered(self, blocks: Collection[int]) -> None:
        """These blocks could not be loaded, and whoever needs them computes them again."""
        self._recovered.update(blocks)

    def clear(self) -> None:
        """Drop everything stored, at the start of the next step."""
        self._clear = True

    def _correct_resumed(self, output: SchedulerOutput) -> None:
        """Tell LMCache how much a resumed request really has.

        It asserts that vLLM took what it offered, but vLLM need not: a longer hit in the pool wins,
        and a request may read no cache at all.
        """
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            spec = self._adapter.load_specs.get(request_id)
            if spec is not None and not spec.can_load:
                spec.vllm_cached_tokens = computed
                spec.lmcache_cached_tokens = min(spec.lmcache_cached_tokens, computed)
