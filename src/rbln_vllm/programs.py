# SPDX-License-Identifier: Apache-2.0
"""The program table: a pure function of configuration that lists every program there is.

Bucket choice, warm-up, compile, cache look-ups and limits all read this table, so traffic can
reach no shape outside it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from rbln_vllm.buckets import bucket_for


class Role(StrEnum):
    """What a program computes."""

    PREFILL = "prefill"
    """Hidden states of one sequence's next chunk."""
    DECODE = "decode"
    """Hidden states of one new token for each of B sequences, and of the drafts after it."""
    LOGITS = "logits"
    """Logits of B rows of hidden states."""
    EMBED = "embed"
    """Embeddings of B token ids, where the others take embeddings."""
    SAMPLER = "sampler"
    """The next tokens of B rows of logits, of what a bitmask allows."""
    DRAW = "draw"
    """The next tokens of B rows of fp32 logits that vLLM has processed."""
    MASK = "mask"
    """Sets what a bitmask forbids of B rows of logits to -infinity, for vLLM to process."""
    DRAFT_PREFILL = "draft_prefill"
    """The drafter's KV of one sequence's next chunk."""
    DRAFT = "draft"
    """The drafts that follow up to Q new tokens of each of B sequences."""
    ENCODER = "encoder"
    """Hidden states of up to B whole sequences, which share B * Q tokens as they like."""
    HEAD = "head"
    """A classifier's logits of B rows of pooled hidden states."""


DRAFT_ROLES = (Role.DRAFT_PREFILL, Role.DRAFT)
CHUNK_ROLES = (Role.PREFILL, Role.DRAFT_PREFILL)
"""Of programs that take one sequence."""

SCORING_ROWS = 64
"""Rows of the widest logits program: prompt scores are computed this many at a time."""


@dataclass(frozen=True, order=True)
class ProgramKey:
    """One static shape: ``batch`` rows of ``query`` tokens each."""

    role: Role
    batch: int
    query: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.query < 1:
            raise ValueError(f"a program needs at least one row of one token: {self}")
        if self.role in CHUNK_ROLES and self.batch != 1:
            raise ValueError("a prefill program takes one sequence")
        several = (*CHUNK_ROLES, Role.DECODE, Role.DRAFT, Role.ENCODER)
        if self.role not in several and self.query != 1:
            raise ValueError(f"a {self.role} program takes one token a row")

    @property
    def name(self) -> str:
        """As in artifacts and logs: ``prefill_b1_q512``, ``decode_b8_q1``, ``decode_b8_q5`` (four
        drafts a row), ``logits_b8_q1``."""
        return f"{self.role}_b{self.batch}_q{self.query}"

    @property
    def num_tokens(self) -> int:
        """Length of the program's flat token axis."""
        return self.batch * self.query


@dataclass(frozen=True)
class DrafterShape:
    """A model that drafts: ``query`` new tokens of a row fit its first pass; ``keeps_kv`` where it
    reads the whole sequence, prompts too, and not only the target's last state."""

    query: int
    keeps_kv: bool

    def __post_init__(self) -> None:
        if self.query < 1:
            raise ValueError(f"a drafter reads a token or more: {self}")


@dataclass(frozen=True)
class ProgramTable:
    """Every program of a configuration.

    ``chunk`` is the prefill length C, ``decode_buckets`` the compiled decode batch sizes in
    ascending order (the last is the largest batch), ``num_blocks_per_seq`` the width T of the
    block table, ``block_size`` in tokens. ``decode_queries`` are the lengths of a decode row, in
    ascending order: 1, and with drafts one more than there can be of them. ``takes_embeds``:
    prefill and decode programs take embeddings in place of token ids.
    """

    chunk: int
    decode_buckets: tuple[int, ...]
    block_size: int
    num_blocks_per_seq: int
    decode_queries: tuple[int, ...] = (1,)
    drafter: DrafterShape | None = None
    takes_embeds: bool = False

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.block_size < 1 or self.num_blocks_per_seq < 1:
            raise ValueError(f"sizes must be positive: {self}")
        if not self.decode_buckets or self.decode_buckets[0] < 1:
            raise ValueError(f"decode buckets must be positive: {self.decode_buckets}")
        if list(self.decode_buckets) != sorted(set(self.decode_buckets)):
            raise ValueError(f"decode buckets must ascend: {self.decode_buckets}")
        if not self.decode_queries or self.decode_queries[0] < 1:
            raise ValueError(f"decode queries must be positive: {self.decode_queries}")
        if list(self.decode_queries) != sorted(set(self.decode_queries)):
            raise ValueError(f"decode queries must ascend: {self.decode_queries}")

    @property
    def prefill(self) -> ProgramKey:
        return ProgramKey(Role.PREFILL, 1, self.chunk)

    @cached_property
    def decodes(self) -> tuple[ProgramKey, ...]:
        return tuple(
            ProgramKey(Role.DECODE, batch, query)
            for query in self.decode_queries
            for batch in self.decode_buckets
        )

    @cached_property
    def logits_rows(self) -> tuple[int, ...]:
        """One row after a prefill, a row per token after a decode, many for prompt scores.

        A decode step without a draft has one token per sequence, whatever its program.
        """
        decode = {key.num_tokens for key in self.decodes}
        return tuple(sorted({1, *self.decode_buckets, *decode, min(self.chunk, SCORING_ROWS)}))

    @cached_property
    def logits(self) -> tuple[ProgramKey, ...]:
        return tuple(ProgramKey(Role.LOGITS, rows) for rows in self.logits_rows)

    @cached_property
    def sampler_rows(self) -> tuple[int, ...]:
        """As many as the logits programs of a step have: samplers take their logits in place."""
        most = self.decode_buckets[-1] * self.decode_queries[-1]
        return tuple(rows for rows in self.logits_rows if rows <= most)

    @property
    def samplers(self) -> tuple[ProgramKey, ...]:
        roles = (Role.SAMPLER, Role.DRAW, Role.MASK)
        return tuple(ProgramKey(role, rows) for role in roles for rows in self.sampler_rows)

    @property
    def drafts(self) -> tuple[ProgramKey, ...]:
        """What the drafter runs, if it is a model: one program a batch, and one for prompts."""
        if self.drafter is None:
            return ()
        query = self.drafter.query
        rows = (ProgramKey(Role.DRAFT, batch, query) for batch in self.decode_buckets)
        return ((self.draft_prefill,) if self.drafter.keeps_kv else ()) + tuple(rows)

    @property
    def draft_prefill(self) -> ProgramKey:
        """It also takes rows that read on but get no drafts. ValueError without a drafter."""
        return ProgramKey(Role.DRAFT_PREFILL, 1, max(self.chunk, self._drafter().query))

    @cached_property
    def embeds(self) -> tuple[ProgramKey, ...]:
        """As many rows as there are tokens in a prefill or decode program."""
        if not self.takes_embeds:
            return ()
        sizes = {key.num_tokens for key in (self.prefill, *self.decodes)}
        return tuple(ProgramKey(Role.EMBED, rows) for rows in sorted(sizes))

    @property
    def programs(self) -> tuple[ProgramKey, ...]:
        """All of them, in the order they are compiled."""
        forward = (self.prefill, *self.decodes, *self.embeds)
        return (*forward, *self.logits, *self.samplers, *self.drafts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key.name for key in self.programs)

    def decode_for(self, batch: int, query: int = 1) -> ProgramKey:
        """The smallest decode program of at least ``batch`` rows of at least ``query`` tokens;
        ValueError when none is."""
        if query > self.decode_queries[-1]:
            raise ValueError(f"no decode row has {query} tokens: rows have {self.decode_queries}")
        fitting = next(known for known in self.decode_queries if known >= query)
        return ProgramKey(Role.DECODE, bucket_for(batch, self.decode_buckets), fitting)

    def embed_for(self, rows: int) -> ProgramKey:
        """The smallest of at least ``rows`` rows; ValueError when none is."""
        buckets = tuple(key.batch for key in self.embeds)
        return ProgramKey(Role.EMBED, bucket_for(rows, buckets))

    def logits_for(self, rows: int) -> ProgramKey:
        """The smallest logits program of at least ``rows`` rows, or else the widest there is
        (the caller then runs it several times)."""
        return next((key for key in self.logits if key.batch >= rows), self.logits[-1])

    def sampler_for(self, role: Role, rows: int) -> ProgramKey:
        """The smallest of at least ``rows`` rows; ValueError when none is."""
        return ProgramKey(role, bucket_for(rows, self.sampler_rows))

    def draft_for(self, rows: int) -> ProgramKey:
        """The smallest draft program of at least ``rows`` rows; ValueError when none is."""
        return ProgramKey(Role.DRAFT, bucket_for(rows, self.decode_buckets), self._drafter().query)

    def _drafter(self) -> DrafterShape:
        if self.drafter is None:
            raise ValueError("no model drafts in this configuration")
        return self.drafter
