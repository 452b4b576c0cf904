# SPDX-License-Identifier: Apache-2.0
"""The program table: every shape traffic can reach is in it, under one name."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbln_vllm.programs import SCORING_ROWS, ProgramKey, ProgramTable, Role

few = settings(max_examples=50)


@st.composite
def tables(draw: st.DrawFn) -> ProgramTable:
    buckets = draw(st.sets(st.integers(1, 64), min_size=1, max_size=8))
    return ProgramTable(
        chunk=draw(st.integers(1, 4096)),
        decode_buckets=tuple(sorted(buckets)),
        block_size=draw(st.integers(1, 1024)),
        num_blocks_per_seq=draw(st.integers(1, 64)),
        decode_queries=draw(st.sampled_from([(1,), (1, 2), (1, 6), (6,)])),
    )


def table(
    chunk: int = 128, buckets: tuple[int, ...] = (1, 2, 4), queries: tuple[int, ...] = (1,)
) -> ProgramTable:
    return ProgramTable(chunk, buckets, block_size=16, num_blocks_per_seq=8, decode_queries=queries)


class TestEmbeds:
    def test_there_are_as_many_rows_as_tokens_in_a_program(self) -> None:
        found = dataclasses.replace(table(queries=(1, 3)), takes_embeds=True)
        assert [key.batch for key in found.embeds] == [1, 2, 3, 4, 6, 12, 128]
        assert set(found.embeds) <= set(found.programs)
        for rows in (1, 5, 13, 127, 128):
            assert found.embed_for(rows).batch >= rows
        with pytest.raises(ValueError, match="129"):
            found.embed_for(129)

    def test_token_ids_need_none(self) -> None:
        assert not table().embeds
        assert not any(name.startswith("embed") for name in table().names)


class TestTable:
    @few
    @given(tables())
    def test_names_are_unique_and_in_the_order_of_programs(self, any_table: ProgramTable) -> None:
        assert len(set(any_table.names)) == len(any_table.programs)
        assert any_table.names == tuple(key.name for key in any_table.programs)

    @few
    @given(tables())
    def test_every_batch_has_the_smallest_bucket_that_holds_it(
        self, any_table: ProgramTable
    ) -> None:
        for batch in range(1, any_table.decode_buckets[-1] + 1):
            for query in {1, *any_table.decode_queries, any_table.decode_queries[-1] - 1} - {0}:
                key = any_table.decode_for(batch, query)
                assert key in any_table.programs
                assert key.role is Role.DECODE
                assert key.batch == min(b for b in any_table.decode_buckets if b >= batch)
                assert key.query == min(q for q in any_table.decode_queries if q >= query)

    @few
    @given(tables())
    def test_a_batch_above_the_largest_bucket_is_refused(self, any_table: ProgramTable) -> None:
        largest = any_table.decode_buckets[-1]
        with pytest.raises(ValueError, match=f"no decode bucket holds {largest + 1} sequences"):
            any_table.decode_for(largest + 1)

    @few
    @given(tables())
    def test_logits_fit_what_forward_programs_give(self, any_table: ProgramTable) -> None:
        """A prefill asks for one row, a decode for its whole bucket, with drafts or without: all
        exactly, no padding."""
        whole = [key.num_tokens for key in any_table.decodes]
        for rows in (1, *any_table.decode_buckets, *whole):
            assert any_table.logits_for(rows).batch == rows
            assert any_table.logits_for(rows) in any_table.programs

    @few
    @given(tables(), st.integers(1, 5000))
    def test_any_number_of_logits_rows_is_covered(self, any_table: ProgramTable, rows: int) -> None:
        key = any_table.logits_for(rows)
        wider = [k for k in any_table.logits if k.batch >= rows]
        assert key == (wider[0] if wider else any_table.logits[-1])

    @few
    @given(tables())
    def test_samplers_have_the_rows_of_the_logits_that_a_step_gives(
        self, any_table: ProgramTable
    ) -> None:
        most = any_table.decodes[-1].num_tokens
        edges = {rows + off for rows in any_table.logits_rows for off in (-1, 0, 1)}
        for rows in sorted(edges & set(range(1, most + 1))):
            for role in (Role.SAMPLER, Role.DRAW, Role.MASK):
                key = any_table.sampler_for(role, rows)
                assert key in any_table.programs
                assert key.batch == any_table.logits_for(rows).batch

    @few
    @given(tables())
    def test_prompt_scores_have_a_wide_program_unless_the_chunk_is_narrow(
        self, any_table: ProgramTable
    ) -> None:
        assert any_table.logits_rows[-1] >= min(any_table.chunk, SCORING_ROWS)
        assert list(any_table.logits_rows) == sorted(set(any_table.logits_rows))

    @few
    @given(tables())
    def test_there_is_one_prefill_program_of_one_chunk(self, any_table: ProgramTable) -> None:
        prefills = [key for key in any_table.programs if key.role is Role.PREFILL]
        assert prefills == [any_table.prefill]
        assert any_table.prefill.num_tokens == any_table.chunk

    def test_the_whole_of_a_small_one(self) -> None:
        assert table().names == (
            "prefill_b1_q128",
            "decode_b1_q1",
            "decode_b2_q1",
            "decode_b4_q1",
            "logits_b1_q1",
            "logits_b2_q1",
            "logits_b4_q1",
            "logits_b64_q1",
            "sampler_b1_q1",
            "sampler_b2_q1",
            "sampler_b4_q1",
            "draw_b1_q1",
            "draw_b2_q1",
            "draw_b4_q1",
            "mask_b1_q1",
            "mask_b2_q1",
            "mask_b4_q1",
        )

    def test_drafts_double_the_decodes(self) -> None:
        names = table(buckets=(1, 2), queries=(1, 4)).names
        assert [name for name in names if name.startswith("decode")] == [
            "decode_b1_q1",
            "decode_b2_q1",
            "decode_b1_q4",
            "decode_b2_q4",
        ]
        rows = [name for name in names if name.startswith(("logits", "draw"))]
        assert rows == [
            *(f"logits_b{rows}_q1" for rows in (1, 2, 4, 8, 64)),
            *(f"draw_b{rows}_q1" for rows in (1, 2, 4, 8)),
        ]

    def test_a_longer_row_than_any_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no decode row has 5 tokens"):
            table(queries=(1, 4)).decode_for(1, 5)

    @pytest.mark.parametrize("queries", [(), (4, 1), (4, 4), (0, 4)])
    def test_queries_that_are_none(self, queries: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="decode queries"):
            table(queries=queries)

    def test_the_smallest_one(self) -> None:
        """Chunks of one token and one sequence: a prefill and a decode of equal shape."""
        smallest = ProgramTable(1, (1,), 1, 1)
        programs = ("prefill", "decode", "logits", "sampler", "draw", "mask")
        assert smallest.names == tuple(f"{name}_b1_q1" for name in programs)
        assert smallest.prefill != smallest.decode_for(1)

    def test_depends_on_sizes_alone(self) -> None:
        assert table() == table()
        assert hash(table()) == hash(table())
        assert table().programs == table().programs
        with pytest.raises(dataclasses.FrozenInstanceError):
            table().chunk = 1  # type: ignore[misc]

    @pytest.mark.parametrize("buckets", [(), (2, 1), (1, 1), (0, 1), (-1,)])
    def test_buckets_that_are_none(self, buckets: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"decode buckets|at least one row"):
            _ = table(buckets=buckets).programs

    @pytest.mark.parametrize("field", ["chunk", "block_size", "num_blocks_per_seq"])
    @pytest.mark.parametrize("size", [0, -1])
    def test_sizes_are_positive(self, field: str, size: int) -> None:
        change: dict[str, Any] = {field: size}
        with pytest.raises(ValueError, match="sizes must be positive"):
            dataclasses.replace(table(), **change)


class TestKey:
    def test_names(self) -> None:
        assert ProgramKey(Role.PREFILL, 1, 512).name == "prefill_b1_q512"
        assert ProgramKey(Role.DECODE, 8).name == "decode_b8_q1"
        assert ProgramKey(Role.DECODE, 8, 5).name == "decode_b8_q5"
        assert ProgramKey(Role.LOGITS, 64).name == "logits_b64_q1"

    @pytest.mark.parametrize(
        ("role", "batch", "query"),
        [
            (Role.DECODE, 0, 1),
            (Role.PREFILL, 1, 0),
            (Role.PREFILL, 2, 16),
            (Role.DECODE, 2, 0),
            (Role.LOGITS, 2, 2),
            (Role.SAMPLER, 2, 2),
        ],
    )
    def test_shapes_that_are_none(self, role: Role, batch: int, query: int) -> None:
        with pytest.raises(ValueError, match=r"program|row"):
            ProgramKey(role, batch, query)

    def test_order_and_identity(self) -> None:
        keys = {ProgramKey(Role.DECODE, 2), ProgramKey(Role.DECODE, 2), ProgramKey(Role.DECODE, 1)}
        assert [key.batch for key in sorted(keys)] == [1, 2]
