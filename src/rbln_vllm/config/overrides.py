# SPDX-License-Identifier: Apache-2.0
"""Sizes of the transformers implementation under optimum-rbln's names.

``optimum_overrides`` of an engine and the options of the ahead-of-time API are the same entries,
checked here once.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from rbln_vllm.config.unbuilt import without_unbuilt
from rbln_vllm.devices import DeviceProfile

CHUNK_MULTIPLE = 64
"""A prefill chunk is a multiple of this many tokens."""


class CompileOverrides(BaseModel):
    """Entries of ``optimum_overrides``; None where vLLM's argument or the device decides.

    ``batch_size`` is vLLM's ``max_num_seqs``, ``max_seq_len`` its ``max_model_len``,
    ``prefill_chunk_size`` its ``max_num_batched_tokens`` and ``kvcache_block_size`` its
    ``block_size``, to which ``kvcache_partition_len`` must be equal.
    """

    LABEL: ClassVar[str] = "optimum_overrides"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "dtype": "dtype is vLLM's: use --dtype",
        "lora_config": "a model that is served by its name takes adapters as they come: use "
        "--enable-lora --lora-modules NAME=PATH, or compile them in with rbln-vllm compile "
        "--lora-modules NAME=PATH",
    }
    """Entries that belong elsewhere, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    batch_size: Annotated[
        PositiveInt | None, Field(description="Sequences that are decoded together, at most.")
    ] = None
    max_seq_len: Annotated[
        PositiveInt | None, Field(description="Tokens of a sequence, prompt and output together.")
    ] = None
    prefill_chunk_size: Annotated[
        PositiveInt | None, Field(description="Tokens of a prefill step, a multiple of 64.")
    ] = None
    kvcache_block_size: Annotated[
        PositiveInt | None, Field(description="Tokens of a KV block.")
    ] = None
    kvcache_partition_len: Annotated[
        PositiveInt | None, Field(description="The same, under the name it has in flash attention.")
    ] = None
    decoder_batch_sizes: Annotated[
        tuple[PositiveInt, ...] | None,
        Field(description="Batch sizes with a decode program of their own, in any order."),
    ] = None
    attn_impl: Annotated[
        Literal["eager", "flash_attn"] | None,
        Field(
            description="eager: a sequence is one block. flash_attn: it is several. Not given: as "
            "the block's size says."
        ),
    ] = None

    use_inputs_embeds: Annotated[
        bool | None,
        Field(
            description="Programs take embeddings, so that prompts may be given as such; those of "
            "tokens are looked up first."
        ),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_chunk(self.prefill_chunk_size, "prefill_chunk_size")
        block, partition = self.kvcache_block_size, self.kvcache_partition_len
        if block is not None and partition is not None and block != partition:
            raise ValueError(
                f"kvcache_partition_len {partition} must equal kvcache_block_size {block}"
            )
        if self.decoder_batch_sizes is not None and not self.decoder_batch_sizes:
            raise ValueError("decoder_batch_sizes is empty: leave it out or name a size")
        return self

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """ValueError, in words, for unknown entries and for values that cannot be."""
        for name, remedy in cls.FOREIGN.items():
            if name in entries:
                raise ValueError(f"{cls.LABEL}: {remedy}")
        given = without_unbuilt(entries, cls.LABEL)
        unknown = sorted(given.keys() - cls.model_fields.keys())
        if unknown:
            raise ValueError(
                f"{cls.LABEL}: {', '.join(unknown)} is unknown; known are "
                f"{', '.join(cls.model_fields)}"
            )
        sizes = given.get("decoder_batch_sizes")
        if isinstance(sizes, list):
            given["decoder_batch_sizes"] = tuple(sizes)
        try:
            return cls(**given)
        except ValidationError as error:
            texts = [
                ": ".join((*map(str, item["loc"]), str(item["msg"]).removeprefix("Value error, ")))
                for item in error.errors()
            ]
            raise ValueError(f"{cls.LABEL}: {'; '.join(texts)}") from error

    @property
    def block_size(self) -> int | None:
        """Tokens of a KV block, under whichever of its names it was given."""
        return self.kvcache_block_size or self.kvcache_partition_len

    def attention_block(self, given: int | None, max_seq_len: int, profile: DeviceProfile) -> int:
        """Tokens of a KV block: as ``given`` or as ``attn_impl`` says, else the device's default.

        ``eager`` attention keeps a sequence in one block of ``max_seq_len``, ``flash_attn`` goes
        over several. ValueError where the two do not go together, or the device has no such block.
        """
        if self.attn_impl == "eager":
            block = given or max_seq_len
            if block != max_seq_len:
                raise ValueError(
                    f"attn_impl eager keeps a sequence in one block of {max_seq_len} tokens "
                    f"(max_seq_len), not in blocks of {block}: leave the block's size out, or use "
                    "attn_impl flash_attn"
                )
        else:
            block = given or _default_block(max_seq_len, profile)
        if self.attn_impl == "flash_attn" and block >= max_seq_len:
            raise ValueError(
                f"attn_impl flash_attn goes over several blocks, but one of {block} tokens holds "
                f"a sequence of {max_seq_len} (max_seq_len): give a smaller kvcache_partition_len, "
                "or use attn_impl eager"
            )
        profile.check_partition(block, max_seq_len)
        return block

    def decode_buckets(self, max_batch: int) -> tuple[int, ...] | None:
        """The decode batch sizes, ascending, ``max_batch`` among them; None when not given.

        ValueError for a size above ``max_batch``.
        """
        if self.decoder_batch_sizes is None:
            return None
        above = [size for size in self.decoder_batch_sizes if size > max_batch]
        if above:
            raise ValueError(
                f"decoder_batch_sizes {above} are larger than the batch size {max_batch}: lower "
                "them or raise --max-num-seqs"
            )
        return tuple(sorted({*self.decoder_batch_sizes, max_batch}))


def check_chunk(chunk: int | None, name: str) -> None:
    """ValueError for a prefill chunk that the transformers implementation cannot have."""
    if chunk is not None and chunk % CHUNK_MULTIPLE:
        raise ValueError(f"{name} {chunk} must be a positive multiple of {CHUNK_MULTIPLE}")


def _default_block(max_seq_len: int, profile: DeviceProfile) -> int:
    if profile.partition_min is None:
        return profile.block_size_for(max_seq_len)
    return profile.partition_for(max_seq_len)
