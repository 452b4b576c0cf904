# SPDX-License-Identifier: Apache-2.0
"""RBLN vLLM: a vLLM hardware plugin for static-shape accelerators.

Keep this module free of vLLM: vLLM imports it while it is still finding its platform, and an
import back into vLLM would make it fall silently back to its own CPU platform.
"""

__version__ = "0.1.0"


def register() -> str:
    """Entry point ``vllm.platform_plugins``: the platform class, by name."""
    return "rbln_vllm.platform.RblnPlatform"


def register_ops() -> None:
    """Entry point ``vllm.general_plugins``, called in every process of the engine."""
    from vllm.platforms import current_platform

    from rbln_vllm.platform import RblnPlatform

    if isinstance(current_platform, RblnPlatform):
        from rbln_vllm.distributed.kv_transfer.lmcache import register as register_lmcache
        from rbln_vllm.models.exaone import register_config as register_exaone
        from rbln_vllm.shims import install

        install()
        register_lmcache()
        register_exaone()
