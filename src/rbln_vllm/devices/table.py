# SPDX-License-Identifier: Apache-2.0
"""The devices there are: one profile each."""

from dataclasses import replace

from rbln_vllm.devices.profile import GIB, MIB, DeviceProfile, Family

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
    default_max_decode_steps=4,
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
    default_max_decode_steps=1,
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
    default_max_decode_steps=1,
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


def resolve_profile(forced_name: str | None, origin: str = "RBLN_FORCE_NPU_NAME") -> DeviceProfile:
    """The profile of the named device, HOST for None.

    Raises ValueError for an unknown name, which ``origin`` gave, listing the known ones.
    """
    if forced_name is None:
        return HOST
    if forced_name not in PROFILES:
        raise ValueError(
            f"unknown device {forced_name!r} in {origin}: known devices are {', '.join(PROFILES)}"
        )
    return PROFILES[forced_name]
