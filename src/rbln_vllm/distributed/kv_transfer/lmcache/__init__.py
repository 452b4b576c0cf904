# SPDX-License-Identifier: Apache-2.0
"""LMCache as a store for KV: chunks of prompts in CPU memory and on a local disk.

Nothing here imports ``lmcache`` before an engine asks for the connector.
"""

from contextlib import suppress
from importlib.util import find_spec

CONNECTOR = "RBLNLMCacheConnectorV1"
LMCACHE_VERSION = "0.5.6"
MISSING = (
    f"{CONNECTOR} needs the package lmcache, which is not installed. Install it without its "
    'dependencies, which bring CUDA: pip install "rbln-vllm[kv_connectors]", then '
    f"pip install --no-deps lmcache=={LMCACHE_VERSION}"
)


def is_installed() -> bool:
    """Whether the package ``lmcache`` can be found; it is not imported."""
    return find_spec("lmcache") is not None


def register() -> None:
    """Tell vLLM the connector's name; a second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
