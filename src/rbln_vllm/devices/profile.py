# SPDX-License-Identifier: Apache-2.0
"""What a device allows and what it defaults to.

Nothing else in the plugin asks which device it is; it asks its profile.
"""

from dataclasses import dataclass
from enum import StrEnum

from rbln_vllm.buckets import STRATEGIES

MIB = 1 << 20
GIB = 1 << 30


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
    # Decode steps in one turn of the engine.
    default_max_decode_steps: int
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
        counts = (
            self.chiplets,
            self.default_max_num_seqs,
            self.default_chunk,
            self.default_bucket_limit,
            self.default_max_decode_steps,
        )
        if min(counts) < 1 or self.default_max_prefill_run < 0:
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
