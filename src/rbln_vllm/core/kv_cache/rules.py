# SPDX-License-Identifier: Apache-2.0
"""When prefix caching works by sub-blocks, and of what size."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rbln_vllm import envs
from rbln_vllm.config import RBLNConfigBase
from rbln_vllm.devices import DeviceProfile, resolve_profile
from rbln_vllm.geometry import chunk_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class SubBlockRules:
    """The sizes in tokens that decide. ``explicit`` is the user's ``sub_block_size``, if any.

    ``enabled``: neither prefix caching nor ``enable_sub_block_cache`` is off.
    """

    explicit: int | None
    enabled: bool
    chunk: int
    block_size: int
    profile: DeviceProfile

    @property
    def size(self) -> int:
        """The size asked for, else the device's default."""
        return self.explicit or self.profile.default_sub_block_size or self.chunk

    def broken_rule(self) -> str | None:
        """Returns in words why sub-blocks of ``size`` cannot work, None if they can."""
        size, chunk, block, device = self.size, self.chunk, self.block_size, self.profile
        the_chunk = f"the chunk (--max-num-batched-tokens), {chunk}"
        rules = (
            (
                self.enabled,
                "it needs prefix caching by sub-blocks: leave out --no-enable-prefix-caching and "
                "--no-rbln-enable-sub-block-cache",
            ),
            (size <= chunk, f"it must not be larger than {the_chunk}"),
            (
                size == chunk or device.sub_block_below_chunk,
                f"on {device.name} it must be {the_chunk}",
            ),
            (
                chunk <= block or device.chunk_above_block,
                f"block_size {block} must not be smaller than {the_chunk}",
            ),
            (size < block, f"it must be smaller than block_size, {block}"),
            (block % size == 0, f"it must divide block_size, {block}"),
        )
        return next((text for holds, text in rules if not holds), None)

    def settle(self, ineligible: str | None = None) -> int | None:
        """Returns the active size, None for caching by whole blocks.

        Args:
            ineligible: why the model's layers rule sub-blocks out, if they do.

        Raises:
            ValueError: the user asked for a size that cannot work; says which rule it breaks.
        """
        reason = self.broken_rule() or ineligible
        if reason is None:
            return self.size
        if self.explicit is not None:
            raise ValueError(f"sub_block_size {self.explicit} cannot be used: {reason}")
        return None


def sub_block_rules(vllm_config: "VllmConfig") -> SubBlockRules:
    """Reads the rules' sizes from a finished configuration."""
    options = vllm_config.additional_config
    known = isinstance(options, RBLNConfigBase)
    caching = bool(vllm_config.cache_config.enable_prefix_caching)
    return SubBlockRules(
        explicit=options.sub_block_size if known else None,
        enabled=caching and known and bool(getattr(options, "enable_sub_block_cache", True)),
        chunk=chunk_size(vllm_config),
        block_size=vllm_config.cache_config.block_size,
        profile=resolve_profile(envs.force_npu_name()),
    )


def check_prefix_caching(vllm_config: "VllmConfig") -> None:
    """Refuses what prefix caching cannot do.

    Raises:
        ValueError: an impossible ``sub_block_size``, or block hashes that another process could
            not reproduce although one is meant to.
    """
    sub_block_rules(vllm_config).settle()
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if shares_hashes(vllm_config) and is_seeded_per_process(algorithm):
        raise ValueError(
            f"--prefix-caching-hash-algo {algorithm} is seeded anew in every process, so nobody "
            "else could use its hashes: with KV events or KV transfer use sha256 or sha256_cbor"
        )


def shares_hashes(vllm_config: "VllmConfig") -> bool:
    """Whether block hashes leave the process."""
    events = vllm_config.kv_events_config
    publishes = events is not None and events.enable_kv_cache_events
    offloads = bool(vllm_config.cache_config.kv_offloading_size)
    return publishes or offloads or vllm_config.kv_transfer_config is not None


def is_seeded_per_process(algorithm: str) -> bool:
    """Whether vLLM seeds this hash at random; it draws again at each call if so."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    function = get_hash_fn_by_name(algorithm)
    return bool(resolve_none_hash_seed(function) != resolve_none_hash_seed(function))
