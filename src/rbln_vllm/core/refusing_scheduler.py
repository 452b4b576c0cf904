# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, able to end a request with an error while all others go on.

A request is refused by the runner, which names it in its output, or here, when its prompt can
never fit the KV pool.
"""

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rbln_vllm.core.limits import max_request_tokens, prompt_refusal
from rbln_vllm.core.refusal import refusal_output, refused_requests

logger = init_logger(f"vllm.{__name__}")


def pool_tokens(kv_cache_config: KVCacheConfig) -> int | None:
    """Returns the tokens one request can keep, None where blocks are recycled or shared."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return None
    return max_request_tokens(kv_cache_config.num_blocks, groups[0].kv_cache_spec.block_size)


class RefusingScheduler(Scheduler):
    """Upstream's decisions; what is refused ends with reason ``error`` in the next update."""

    max_model_len: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusals: dict[str, str] = {}
        self._pool_tokens = pool_tokens(self.kv_cache_config)
        if self._pool_tokens is not None:
            # The last token of a request is never computed, so it needs no slot. A request
            # that grows to the end of the pool ends with reason "length" instead of waiting
            # for a block that cannot exist. Start-up refuses such a max_model_len anyway.
            self.max_model_len = min(self.max_model_len, self._pool_tokens + 1)

    def add_request(self, request: Request) -> None:
        """Queues ``request``; refuses it when its prompt can never fit the KV pool."""
        super().add_request(request)
        if self._pool_tokens is None:
            return
        reason = prompt_refusal(request.num_prompt_tokens, self._pool_tokens)
        if reason is not None:
            self.refuse_requests({request.request_id: reason})

    def refuse_requests(self, reasons: Mapping[str, str]) -> None:
        """Ends these requests (id to reason) with ``error`` in the next update."""
        for request_id, reason in reasons.items():
            logger.warning("Request %s is refused: %s", request_id, reason)
            self._refusals[request_id] = reason

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Applies a step's output; refused requests end, all others go on."""
        refused = refused_requests(model_runner_output)
        if refused:
            self._withdraw(refused, scheduler_output)
            self.refuse_requests(refused)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._commit(scheduler_output)
        reasons, self._refusals = self._refusals, {}
        for request in self.finish_requests(reasons, RequestStatus.FINISHED_ERROR):
            client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            client.outputs.append(refusal_output(request, reasons[request.request_id]))
        return outputs

    def _withdraw(self, refused: Mapping[str, str], scheduler_output: SchedulerOutput) -> None:
        """For subclasses: the step did not write what it should have for ``refused``."""

    def _commit(self, scheduler_output: SchedulerOutput) -> None:
        """For subclasses: the step's output is applied, its refused requests are still there."""
