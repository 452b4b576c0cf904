# SPDX-License-Identifier: Apache-2.0
"""The speculation benchmark: its requests, its counters, its figures."""

from __future__ import annotations

import json

from benchmarks import speculation
from benchmarks.speculation import CONFIGURATIONS, Taken
from benchmarks.systems import SYSTEMS

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 7.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 21.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
"""


class TestWorkload:
    def test_a_passage_is_begun_a_third_time(self) -> None:
        for prompt in speculation.workload("copy", 3, seed=0):
            passage = speculation.PASSAGE_TOKENS
            assert prompt[:passage] == prompt[passage : 2 * passage]
            assert prompt[2 * passage :] == prompt[: speculation.BEGUN_TOKENS]

    def test_tasks_are_as_long_and_fit(self) -> None:
        lengths = {
            len(prompt) for task in speculation.TASKS for prompt in speculation.workload(task, 9, 0)
        }
        (length,) = lengths
        drafts = max(
            c.speculation.get("num_speculative_tokens", 0) for c in CONFIGURATIONS.values()
        )
        assert length + speculation.TOKENS_OUT + drafts <= speculation.MAX_MODEL_LEN

    def test_the_same_for_every_run(self) -> None:
        assert speculation.workload("copy", 4, 1) == speculation.workload("copy", 4, 1)
        assert speculation.workload("copy", 4, 1) != speculation.workload("copy", 4, 2)


class TestFigures:
    def test_counters_of_a_page(self) -> None:
        counts = speculation.parse_counts(PAGE)
        assert counts == {"num_drafts": 7, "num_draft_tokens": 21, "num_accepted_tokens": 12}

    def test_a_server_without_drafts_has_none(self) -> None:
        assert set(speculation.parse_counts("").values()) == {0}

    def test_a_row(self) -> None:
        taken = [Taken(rate, speculation.parse_counts(PAGE)) for rate in (10.0, 30.0, 20.0)]
        row = speculation.row("ngram", "copy", 1, taken)
        assert row["tokens_per_s"] == 20
        assert row["accepted_share"] == round(12 / 21, 3)

    def test_the_table_has_a_line_for_each_task(self) -> None:
        taken = [Taken(10.0, speculation.parse_counts(PAGE))]
        rows = [
            speculation.row("ngram", task, batch, taken)
            for task in speculation.TASKS
            for batch in speculation.BATCHES
        ]
        lines = speculation.markdown(rows).splitlines()
        assert len(lines) == 2 + len(speculation.TASKS)
        assert lines[2] == "| n-grams, 4 drafts | copy | 10.0 | 10.0 | 57 % |"


def test_configurations_can_be_started() -> None:
    for chosen in CONFIGURATIONS.values():
        assert chosen.system in SYSTEMS
        arguments = chosen.server_arguments
        if chosen.speculation:
            at = arguments.index("--speculative-config")
            assert json.loads(arguments[at + 1]) == chosen.speculation
