# SPDX-License-Identifier: Apache-2.0
"""``optimum_overrides``: sizes of the transformers implementation under optimum-rbln's names."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

CHUNK_MULTIPLE = 64
"""A prefill chunk is a multiple of this many tokens."""


class CompileOverrides(BaseModel):
    """Entries of ``optimum_overrides``; None where vLLM's argument or the device decides.

    ``batch_size`` is vLLM's ``max_num_seqs``, ``max_seq_len`` its ``max_model_len``,
    ``prefill_chunk_size`` its ``max_num_batched_tokens`` and ``kvcache_block_size`` its
    ``block_size``, to which ``kvcache_partition_len`` must be equal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    batch_size: PositiveInt | None = None
    max_seq_len: PositiveInt | None = None
    prefill_chunk_size: PositiveInt | None = None
    kvcache_block_size: PositiveInt | None = None
    kvcache_partition_len: PositiveInt | None = None
    decoder_batch_sizes: Annotated[tuple[PositiveInt, ...] | None, "any order"] = None
    attn_impl: Literal["eager", "flash_attn"] | None = None

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
    def of(cls, entries: Mapping[str, Any]) -> "CompileOverrides":
        """ValueError, in words, for unknown entries and for values that cannot be."""
        if "dtype" in entries:
            raise ValueError("optimum_overrides: dtype is vLLM's: use --dtype")
        unknown = sorted(entries.keys() - cls.model_fields.keys())
        if unknown:
            raise ValueError(
                f"optimum_overrides: {', '.join(unknown)} is unknown or not built yet; known are "
                f"{', '.join(cls.model_fields)}"
            )
        sizes = entries.get("decoder_batch_sizes")
        if isinstance(sizes, list):
            entries = {**entries, "decoder_batch_sizes": tuple(sizes)}
        try:
            return cls(**entries)
        except ValidationError as error:
            texts = [
                ": ".join((*map(str, item["loc"]), str(item["msg"]).removeprefix("Value error, ")))
                for item in error.errors()
            ]
            raise ValueError(f"optimum_overrides: {'; '.join(texts)}") from error

    @property
    def block_size(self) -> int | None:
        """Tokens of a KV block, under whichever of its names it was given."""
        return self.kvcache_block_size or self.kvcache_partition_len

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
