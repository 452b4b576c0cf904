# SPDX-License-Identifier: Apache-2.0
"""What keeps KV apart besides the tokens: cache salts and adapters.

LMCache's keys hold a model's name and a hash of the tokens, and as many *tags* as a request brings.
"""

import json
from typing import TYPE_CHECKING, Any

import blake3

from rbln_vllm.lora.identity import adapter_identity

if TYPE_CHECKING:
    from vllm.v1.request import Request

TAG = "lmcache.tag.rbln"


def request_tags(request: "Request") -> dict[str, str]:
    """The tags of a request, empty when tokens alone say which KV it may use."""
    parts: dict[str, Any] = {}
    if request.cache_salt:
        parts["salt"] = request.cache_salt
    if request.lora_request is not None:
        parts["adapter"] = adapter_identity(request.lora_request)
    if not parts:
        return {}
    # A digest: salts are secret and tags become part of keys, and of what is on the disk.
    return {TAG: blake3.blake3(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}
