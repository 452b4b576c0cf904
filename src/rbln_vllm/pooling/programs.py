# SPDX-License-Identifier: Apache-2.0
"""Program tables of pooling models: no sampler, and for encoders no prefill and no decode."""

from dataclasses import dataclass
from functools import cached_property

from rbln_vllm.buckets import bucket_for
from rbln_vllm.programs import ProgramKey, ProgramTable, Role

SHORTEST_ROW = 16
"""Tokens of the shortest length bucket."""


@dataclass(frozen=True)
class PoolingTable(ProgramTable):
    """Of a decoder that pools: its prefill and decode programs, and a classifier if it has one."""

    has_head: bool = False

    @property
    def heads(self) -> tuple[ProgramKey, ...]:
        if not self.has_head:
            return ()
        return tuple(ProgramKey(Role.HEAD, batch) for batch in self.decode_buckets)

    @property
    def programs(self) -> tuple[ProgramKey, ...]:
        return (self.prefill, *self.decodes, *self.heads)

    def head_for(self, rows: int) -> ProgramKey:
        """The smallest classifier of at least ``rows`` rows; ValueError when none is."""
        return ProgramKey(Role.HEAD, bucket_for(rows, self.decode_buckets))


@dataclass(frozen=True)
class EncoderTable(PoolingTable):
    """Of an encoder: one program per batch bucket and length bucket, as far as a step can fill it.

    A step has at most ``max_tokens`` tokens of at most ``decode_buckets[-1]`` sequences, and
    sequences are no longer than ``max_length``. A program for B rows of Q tokens takes any step
    of up to B sequences and B * Q tokens: sequences lie one after another without padding.
    """

    max_length: int = 1
    max_tokens: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_length <= self.max_tokens:
            raise ValueError(f"a step must hold a sequence of the maximum length: {self}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length buckets, ascending: powers of two and the maximum length."""
        powers = (SHORTEST_ROW << shift for shift in range(self.max_length.bit_length()))
        return (*(length for length in powers if length < self.max_length), self.max_length)

    @cached_property
    def encoders(self) -> tuple[ProgramKey, ...]:
        """Of each batch bucket the lengths up to the first that holds a step's tokens, ordered by
        their capacity."""
        keys = [key for batch in self.decode_buckets for key in self._encoders_of(batch)]
        return tuple(sorted(keys, key=lambda key: (key.num_tokens, key.batch)))

    @property
    def programs(self) -> tuple[ProgramKey, ...]:
        return (*self.encoders, *self.heads)

    def encoder_for(self, sequences: int, tokens: int) -> ProgramKey:
        """The smallest program for so many sequences and tokens in all.

        ValueError when there is none: the step has more than it may have.
        """
        for key in self.encoders:
            if key.batch >= sequences and key.num_tokens >= tokens:
                return key
        raise ValueError(f"no encoder program holds {tokens} tokens of {sequences} sequences")

    def _encoders_of(self, batch: int) -> tuple[ProgramKey, ...]:
        fitting = [length for length in self.lengths if batch * length < self.max_tokens]
        beyond = [length for length in self.lengths if batch * length >= self.max_tokens][:1]
        return tuple(ProgramKey(Role.ENCODER, batch, length) for length in (*fitting, *beyond))
