# SPDX-License-Identifier: Apache-2.0
"""Requests the runner declines to run, and how they leave the engine.

Under ``--rbln-strict-programs`` a request whose program was never compiled must not start a
compile. The runner names it in its output; the scheduler ends that request with finish reason
``error``, frees its blocks, and everybody else goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request


@dataclass
class RBLNModelRunnerOutput(ModelRunnerOutput):
    """A runner's output that may refuse requests.

    ``refused`` maps request id to the reason. A refused request still has its row in
    ``req_ids``, ``req_id_to_index`` and an empty list in ``sampled_token_ids``.
    """

    refused: dict[str, str] = field(default_factory=dict)


def refused_step(
    request_ids: Sequence[str], reason: str, kv_connector_output: KVConnectorOutput | None
) -> RBLNModelRunnerOutput:
    """Returns the output of a step that did not run: no tokens, and all its requests refused."""
    return RBLNModelRunnerOutput(
        req_ids=list(request_ids),
        req_id_to_index={request: index for index, request in enumerate(request_ids)},
        sampled_token_ids=[[] for _ in request_ids],
        kv_connector_output=kv_connector_output,
        refused=dict.fromkeys(request_ids, reason),
    )


def refused_requests(output: ModelRunnerOutput) -> Mapping[str, str]:
    """Returns what ``output`` refuses: request id to reason, empty for an upstream output."""
    return output.refused if isinstance(output, RBLNModelRunnerOutput) else {}


def refusal_output(request: Request, reason: str) -> EngineCoreOutput:
    """Returns the last output of ``request``; the reason travels as its stop reason."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
