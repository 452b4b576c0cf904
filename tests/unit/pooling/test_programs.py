# SPDX-License-Identifier: Apache-2.0
"""Tables of pooling models: every step there can be has a program, the smallest that holds it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbln_vllm.pooling.programs import SHORTEST_ROW, EncoderTable, PoolingTable
from rbln_vllm.programs import Role

few = settings(max_examples=50)


@st.composite
def encoders(draw: st.DrawFn) -> EncoderTable:
    buckets = draw(st.sets(st.integers(1, 64), min_size=1, max_size=5))
    longest = draw(st.integers(1, 700))
    most = longest + draw(st.integers(0, 2000))
    sizes = (longest, tuple(sorted(buckets)), 16, 8)
    return EncoderTable(*sizes, has_head=True, max_length=longest, max_tokens=most)


def encoder(longest: int, most: int, buckets: tuple[int, ...] = (1, 2, 4)) -> EncoderTable:
    return EncoderTable(longest, buckets, 16, 8, max_length=longest, max_tokens=most)


class TestEncoder:
    @few
    @given(encoders(), st.data())
    def test_every_step_has_the_smallest_program(
        self, table: EncoderTable, data: st.DataObject
    ) -> None:
        sequences = data.draw(st.integers(1, table.decode_buckets[-1]))
        most = min(table.max_tokens, sequences * table.max_length)
        tokens = data.draw(st.integers(min(sequences, most), most))
        key = table.encoder_for(sequences, tokens)
        assert key in table.programs
        fitting = [k for k in table.encoders if k.batch >= sequences and k.num_tokens >= tokens]
        assert key.num_tokens == min(k.num_tokens for k in fitting)

    @few
    @given(encoders())
    def test_names_are_unique(self, table: EncoderTable) -> None:
        assert len(set(table.names)) == len(table.programs)

    def test_the_whole_of_a_small_one(self) -> None:
        assert encoder(64, 128).names == (
            "encoder_b1_q16",
            "encoder_b1_q32",
            "encoder_b2_q16",
            "encoder_b1_q64",
            "encoder_b2_q32",
            "encoder_b4_q16",
            "encoder_b2_q64",
            "encoder_b4_q32",
        )

    @pytest.mark.parametrize(
        ("longest", "lengths"),
        [
            (1, (1,)),
            (SHORTEST_ROW - 1, (15,)),
            (SHORTEST_ROW, (16,)),
            (SHORTEST_ROW + 1, (16, 17)),
            (64, (16, 32, 64)),
            (65, (16, 32, 64, 65)),
        ],
    )
    def test_lengths(self, longest: int, lengths: tuple[int, ...]) -> None:
        assert encoder(longest, longest).lengths == lengths

    def test_a_step_that_no_program_holds(self) -> None:
        with pytest.raises(ValueError, match="no encoder program holds 129 tokens"):
            encoder(64, 128).encoder_for(4, 129)
        with pytest.raises(ValueError, match="of 5 sequences"):
            encoder(64, 128).encoder_for(5, 5)

    def test_a_step_holds_the_longest_sequence(self) -> None:
        with pytest.raises(ValueError, match="a step must hold a sequence"):
            encoder(65, 64)


def test_a_decoder_that_pools_has_neither_logits_nor_samplers() -> None:
    table = PoolingTable(64, (1, 4), 16, 8, has_head=True)
    assert table.names == (
        "prefill_b1_q64",
        "decode_b1_q1",
        "decode_b4_q1",
        "head_b1_q1",
        "head_b4_q1",
    )
    assert table.head_for(3).batch == 4
    assert table.head_for(3).role is Role.HEAD
    assert PoolingTable(64, (4,), 16, 8).heads == ()
