# SPDX-License-Identifier: Apache-2.0
"""Device profiles: what a device allows and what it defaults to, as rows of one table.

Nothing else in the plugin asks which device it is; it asks its profile.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from rbln_vllm.buckets import STRATEGIES

MIB = 1 << 20
GIB = 1 << 30

# What one loaded program costs in device memory besides its weights (the vendor's estimate).
RUNTIME_BUFFER_BYTES = 256 * MIB
WEIGHT_ALIGNMENT_BYTES = 2 * MIB


class Family(StrEnum):
    HOST = "host"
    ATOM = "atom"
    REBEL100 = "rebel100"


@dataclass(frozen=True)
class DeviceProfile:
    """Limits and defaults of one device. Lengths are tokens; None means no limit.

    `partition_*`, `eager_max_model_len` and `max_sliding_window` are limits of the transformers
    implementation, `block_size_*` and `max_block_id` of the vllm implementation.
    """

    name: str
    family: Family
    implementations: frozenset[str]
    # None = the machine's memory.
    memory_bytes: int | None
    reserved_bytes: int
    # Compute dies that share `memory_bytes`; every runtime needs its buffer on each of them.
    chiplets: int
    default_max_num_seqs: int
    default_chunk: int
    # None = the user must give it.
    default_block_size: int | None
    default_gpu_memory_utilization: float
    default_bucket_strategy: str
    default_bucket_limit: int
    # Consecutive prefill steps while decodes wait; 0 = unbounded.
    default_max_prefill_run: int
    # Granularity of prefix caching; None = the chunk.
    default_sub_block_size: int | None
    # Whether prefix hits may end inside a chunk, and whether a chunk may be longer than a block.
    sub_block_below_chunk: bool
    chunk_above_block: bool
    block_size_multiple: int
    block_size_min: int
    block_size_max: int | None
    block_size_power_of_two: bool
    # Block ids are int16 in the device's kernels.
    max_block_id: int | None
    eager_max_model_len: int | None
    partition_min: int | None
    partition_max: int | None
    partition_default: int | None
    max_sliding_window: int | None

    def __post_init__(self) -> None:
        if not self.implementations or self.implementations - {"vllm", "transformers"}:
            raise ValueError(f"{self.name}: implementations are vllm and transformers")
        if not 0 < self.default_gpu_memory_utilization <= 1:
            raise ValueError(f"{self.name}: gpu_memory_utilization must be in (0, 1]")
        if self.default_bucket_strategy not in STRATEGIES:
            raise ValueError(f"{self.name}: unknown bucket strategy")
        counts = (self.chiplets, self.default_max_num_seqs, self.default_chunk)
        if min(*counts, self.default_bucket_limit) < 1 or self.default_max_prefill_run < 0:
            raise ValueError(f"{self.name}: counts must be positive")
        if self.memory_bytes is not None and not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ValueError(f"{self.name}: reserved memory must be less than the memory")
        if self.default_block_size is not None:
            self.check_block_size(self.default_block_size)

    @property
    def is_dry_run(self) -> bool:
        """True if programs execute on the CPU in place of the named device."""
        return self.family is not Family.HOST

    def dry_run_line(self) -> str | None:
        """The line the start-up log says on a dry run; None on HOST."""
        if not self.is_dry_run:
            return None
        memory_gib = (self.memory_bytes or 0) // GIB
        return (
            f"Dry run of {self.name} ({self.family}, {memory_gib} GiB): programs execute on this "
            "machine's CPU; limits, defaults and refusals are that device's."
        )

    def block_size_rule(self) -> str:
        """The block sizes the vllm implementation accepts, in words."""
        if self.block_size_power_of_two:
            return f"a power of two from {self.block_size_min} to {self.block_size_max}"
        return f"a positive multiple of {self.block_size_multiple}"

    def check_block_size(self, block_size: int) -> None:
        """Raises ValueError unless the vllm implementation can use `block_size` here."""
        allowed = (
            block_size >= self.block_size_min
            and (self.block_size_max is None or block_size <= self.block_size_max)
            and block_size % self.block_size_multiple == 0
            and (not self.block_size_power_of_two or block_size & (block_size - 1) == 0)
        )
        if not allowed:
            raise ValueError(
                f"block_size {block_size} does not work on {self.name}: --block-size must be "
                f"{self.block_size_rule()}"
            )

    def block_size_for(self, max_model_len: int) -> int:
        """The default block size for sequences of `max_model_len` tokens.

        Where blocks are powers of two, a short model gets the largest one it fills, so that
        a block is no longer than a sequence.
        """
        if self.default_block_size is None:
            raise ValueError(f"--block-size is required on {self.name}: it has no default there")
        if not self.block_size_power_of_two or max_model_len >= self.default_block_size:
            return self.default_block_size
        return max(self.block_size_min, 1 << (max(max_model_len, 1).bit_length() - 1))

    def partition_for(self, max_model_len: int) -> int:
        """The default block of the transformers implementation where it has partitions.

        Flash attention over partitions where the sequence divides into them, otherwise one block
        for a whole sequence.
        """
        size = self.partition_default
        if size is not None and max_model_len % size == 0 and max_model_len >= 2 * size:
            return size
        return max_model_len

    def check_partition(self, block_size: int, max_model_len: int) -> None:
        """Raises ValueError unless the transformers implementation can use these sizes here."""
        if self.partition_min is None or self.partition_max is None:
            self.check_block_size(block_size)
        elif block_size == max_model_len:
            if self.eager_max_model_len is not None and max_model_len > self.eager_max_model_len:
                raise ValueError(
                    f"{self.family}: a sequence of {max_model_len} tokens in one block is longer "
                    f"than {self.eager_max_model_len}: give a --block-size from "
                    f"{self.partition_min} to {self.partition_max} that divides it, or a lower "
                    "--max-model-len"
                )
        elif not self.partition_min <= block_size <= self.partition_max:
            raise ValueError(
                f"{self.family}: a --block-size (kvcache_partition_len) of {block_size} is not "
                f"from {self.partition_min} to {self.partition_max}, nor the --max-model-len of "
                f"{max_model_len}"
            )
        elif max_model_len % block_size:
            raise ValueError(
                f"{self.family}: --max-model-len {max_model_len} must be a multiple of the "
                f"--block-size {block_size}, and twice as long at least"
            )

    def check_window(self, window: int, chunk: int) -> None:
        """Raises ValueError for a sliding window that does not fit beside a prefill chunk."""
        limit = self.max_sliding_window
        if limit is not None and window > limit - chunk:
            raise ValueError(
                f"{self.family}: a sliding window of {window} tokens is longer than {limit} less "
                f"the prefill chunk of {chunk}: give a smaller --max-num-batched-tokens "
                "(prefill_chunk_size), or use a model with a smaller window"
            )

    def check_num_blocks(self, num_blocks: int) -> None:
        """Raises ValueError if the ids of `num_blocks` blocks do not fit the device's kernels."""
        if self.max_block_id is not None and num_blocks - 1 > self.max_block_id:
            raise ValueError(
                f"{num_blocks} KV blocks are too many for {self.name}: block ids end at "
                f"{self.max_block_id}. Lower --num-gpu-blocks-override or use a larger --block-size"
            )

    def cap_num_blocks(self, num_blocks: int) -> int:
        """The largest pool of at most `num_blocks` whose ids fit the device's kernels."""
        return num_blocks if self.max_block_id is None else min(num_blocks, self.max_block_id + 1)


HOST = DeviceProfile(
    name="HOST",
    family=Family.HOST,
    implementations=frozenset({"vllm", "transformers"}),
    memory_bytes=None,
    reserved_bytes=0,
    chiplets=1,
    default_max_num_seqs=16,
    default_chunk=256,
    default_block_size=128,
    default_gpu_memory_utilization=0.5,
    default_bucket_strategy="exponential",
    default_bucket_limit=32,
    default_max_prefill_run=1,
    # A block here is shorter than a chunk, so "the chunk" would turn sub-blocks off. 16 tokens
    # are 8 to a block: the mean loss of a hit is 8 tokens of prefill, and naming a sub-block
    # costs a thousandth of computing it.
    default_sub_block_size=16,
    sub_block_below_chunk=True,
    chunk_above_block=True,
    block_size_multiple=8,
    block_size_min=8,
    block_size_max=None,
    block_size_power_of_two=False,
    max_block_id=None,
    eager_max_model_len=None,
    partition_min=None,
    partition_max=None,
    partition_default=None,
    max_sliding_window=None,
)

# The vllm implementation is refused on ATOM, so no block size is ever checked there: the
# transformers implementation has its own partition rule and no default.
ATOM = DeviceProfile(
    name="RBLN-CA25",
    family=Family.ATOM,
    implementations=frozenset({"transformers"}),
    memory_bytes=16 * GIB,
    reserved_bytes=288 * MIB,
    chiplets=1,
    default_max_num_seqs=1,
    default_chunk=128,
    default_block_size=None,
    default_gpu_memory_utilization=0.93,
    default_bucket_strategy="exponential",
    default_bucket_limit=1,
    default_max_prefill_run=0,
    default_sub_block_size=None,
    sub_block_below_chunk=False,
    chunk_above_block=False,
    block_size_multiple=1,
    block_size_min=1,
    block_size_max=None,
    block_size_power_of_two=False,
    max_block_id=None,
    eager_max_model_len=32_768,
    partition_min=1_024,
    partition_max=32_768,
    partition_default=16_384,
    max_sliding_window=32_768,
)

REBEL100 = DeviceProfile(
    name="RBLN-CR03",
    family=Family.REBEL100,
    implementations=frozenset({"vllm", "transformers"}),
    memory_bytes=144 * GIB,
    reserved_bytes=4 * GIB,
    chiplets=4,
    default_max_num_seqs=1,
    default_chunk=512,
    default_block_size=8_192,
    default_gpu_memory_utilization=0.93,
    default_bucket_strategy="exponential",
    default_bucket_limit=1,
    default_max_prefill_run=0,
    default_sub_block_size=None,
    sub_block_below_chunk=False,
    chunk_above_block=False,
    block_size_multiple=1,
    block_size_min=512,
    block_size_max=16_384,
    block_size_power_of_two=True,
    max_block_id=32_767,
    eager_max_model_len=16_384,
    partition_min=1_024,
    partition_max=16_384,
    partition_default=8_192,
    max_sliding_window=32_767,
)

PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        HOST,
        *(replace(ATOM, name=f"RBLN-CA{number}") for number in ("02", "12", "22", "25")),
        REBEL100,
        replace(REBEL100, name="RBLN-CR13", sub_block_below_chunk=True),
    )
}


def resolve_profile(forced_name: str | None) -> DeviceProfile:
    """The profile of the named device, HOST for None.

    Raises ValueError for an unknown name, listing the known ones.
    """
    if forced_name is None:
        return HOST
    if forced_name not in PROFILES:
        raise ValueError(
            f"unknown device {forced_name!r} in RBLN_FORCE_NPU_NAME: known devices are "
            f"{', '.join(PROFILES)}"
        )
    return PROFILES[forced_name]


def aligned_weight_bytes(parts: Iterable[int]) -> int:
    """Device bytes of weights stored as `parts` (bytes per layer, lm_head), each 2 MiB aligned."""
    unit = WEIGHT_ALIGNMENT_BYTES
    return sum(-(-part // unit) * unit for part in parts)


def npu_kv_budget(
    profile: DeviceProfile,
    utilization: float,
    weight_bytes: int,
    num_runtimes: int,
    num_devices: int,
    *,
    num_kv_heads: int | None = None,
) -> int:
    """Bytes left for the KV cache on an NPU: the vendor's static estimate.

    `num_runtimes` counts loaded programs, `num_devices` the NPUs of one worker. With fewer
    `num_kv_heads` than compute dies the heads are replicated, which costs that much of the budget.

    Raises ValueError on HOST (its memory is measured, not estimated) and for more than one Rebel100
    per worker; MemoryError if weights and runtimes do not fit.
    """
    if profile.memory_bytes is None:
        raise ValueError(f"{profile.name} has no static memory estimate: measure free memory")
    if profile.family is Family.REBEL100 and num_devices != 1:
        raise ValueError(
            f"num_devices_per_local_rank must be 1 on {profile.name}, not {num_devices}"
        )
    width = num_devices * profile.chiplets
    usable = int((profile.memory_bytes - profile.reserved_bytes) * num_devices * utilization)
    buffers = RUNTIME_BUFFER_BYTES * num_runtimes * width
    budget = usable - weight_bytes - buffers
    if budget < 0:
        raise MemoryError(_out_of_memory_text(profile, utilization, usable, weight_bytes, buffers))
    replication = max(1, width // num_kv_heads) if num_kv_heads else 1
    return budget // replication


def _out_of_memory_text(
    profile: DeviceProfile, utilization: float, usable: int, weight_bytes: int, buffers: int
) -> str:
    return (
        f"Insufficient DRAM on {profile.name}: {usable // MIB} MiB are usable at "
        f"gpu_memory_utilization {utilization}, but weights need {weight_bytes // MIB} MiB and "
        f"programs {buffers // MIB} MiB. Use a smaller model, fewer decode buckets or a higher "
        "--gpu-memory-utilization (reducing gpu_memory_utilization shrinks the usable part)."
    )
