# SPDX-License-Identifier: Apache-2.0
"""Requests whose adapter cannot be loaded any more: they end, and the step's others go on."""

from collections.abc import Mapping
from dataclasses import fields

from vllm.v1.outputs import ModelRunnerOutput

from rbln_vllm.core.refusal import RBLNModelRunnerOutput


def without(output: ModelRunnerOutput, reasons: Mapping[str, str]) -> ModelRunnerOutput:
    """The output of a step without the tokens of these requests (id to reason), as refused."""
    if not reasons:
        return output
    values = {field.name: getattr(output, field.name) for field in fields(ModelRunnerOutput)}
    rows = [output.req_id_to_index[request] for request in reasons]
    tokens = list(output.sampled_token_ids)
    for row in rows:
        if tokens:
            tokens[row] = []
    return RBLNModelRunnerOutput(**{**values, "sampled_token_ids": tokens}, refused=dict(reasons))
