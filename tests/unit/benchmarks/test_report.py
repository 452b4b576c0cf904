# SPDX-License-Identifier: Apache-2.0
"""The benchmark's tables, from what a run wrote."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import plots, report
from benchmarks.costs import Limits, Work, shape_from_config
from benchmarks.probes import ContextStep, DecodeStep, Prefill, describe
from tests.unit.benchmarks.sizes import LIMITS, SMOLLM2


def section(samples: dict[str, Any], probes: list[Any]) -> dict[str, Any]:
    shape = shape_from_config(SMOLLM2)
    return {
        "probes": [describe(probe, shape) for probe in probes],
        "samples": samples,
        "systems": {name: {} for name in next(iter(samples.values()))},
        "memory_mib": {"ours": 1500},
        "limits": [{"read_gb_s": 80, "matrix_gflop_s": 900, "matrix_kind": "bf16"}],
    }


class TestReport:
    row = report.Row("step", False, Work(80e6, 1, 1), {"ours": [2, 4, None], "openvino": [6, 4, 9]})

    def test_medians_and_ratios_use_the_rounds_that_have_both(self) -> None:
        assert self.row.median("ours") == 3
        assert self.row.median("vllm_cpu") is None
        assert self.row.ratios("openvino") == [3, 1]

    def test_a_time_below_zero_has_no_ratio_and_no_share(self) -> None:
        row = report.Row("step", False, Work(1, 1, 1), {"ours": [-2, 4], "openvino": [6, 8]})
        assert row.ratios("openvino") == [2]
        below = report.Row("step", False, Work(1, 1, 1), {"ours": [-2]})
        assert below.share("ours", LIMITS) is None

    def test_rates_turn_ratios_and_shares_round(self) -> None:
        rate = report.Row("rate", True, Work(80e9, 1, 1000), {"ours": [500.0], "openvino": [250.0]})
        assert rate.ratios("openvino") == [2]
        assert rate.at_limit(LIMITS) == 1000
        assert rate.share("ours", LIMITS) == 0.5
        assert self.row.at_limit(LIMITS) == pytest.approx(1)
        assert self.row.share("ours", LIMITS) == pytest.approx(1 / 3)

    def test_comparison(self) -> None:
        data = section(
            {"decode_b1": {"ours": [5.0, 7.0], "openvino": [10.0, 14.0]}}, [DecodeStep(1)]
        )
        assert report.comparison(data).splitlines() == [
            "|  | limit | rbln-vllm | OpenVINO GenAI |",
            "| --- | --- | --- | --- |",
            "| decode step, batch 1 (ms) | 3.42 | **6.00** (57 % of limit) "
            "| 12.0 (2.00x; 2.0 to 2.0) |",
            "| memory after that (MiB) | - | 1,500 | - |",
        ]

    def test_comparison_without_limits_or_ours(self) -> None:
        data = section({"decode_b1": {"ours": [None], "openvino": [10.0]}}, [DecodeStep(1)])
        assert report.comparison({**data, "limits": []}).splitlines()[-2] == (
            "| decode step, batch 1 (ms) | - | **-** (- of limit) | 10.0 |"
        )

    def test_limits_are_those_of_the_section(self) -> None:
        slow = section({"decode_b1": {"ours": [5.0]}}, [DecodeStep(1)])
        slow["limits"] = [
            {"read_gb_s": rate, "matrix_gflop_s": 9, "matrix_kind": "x"} for rate in (20, 40)
        ]
        found = report.tables(
            {
                "sections": {
                    "decode": slow,
                    "large": section({"decode_b1": {"ours": [5.0]}}, [DecodeStep(1)]),
                }
            }
        )
        assert found["limits"] == (
            "Limits: decode reading 40 GB/s, x 9 GFLOP/s; large reading 80 GB/s, bf16 900 GFLOP/s."
        )
        assert report.limits_of(slow) == Limits(40e9, 9e9)

    def test_growth_is_paired_within_rounds(self) -> None:
        probes = [ContextStep(128), ContextStep(4096)]
        data = section(
            {"context_128": {"ours": [4.0, 9.0]}, "context_4096": {"ours": [6.0, 11.0]}}, probes
        )
        last = report.growth(data).splitlines()[-1]
        assert last == "| batch 1, context 4,096 | 1.14 | 2.00 (57 % of bandwidth) |"

    def test_starts(self) -> None:
        rows = [
            {"kind": "cold", "start_seconds": 9, "ready_seconds": 12, "memory_mib": 700},
            {"kind": "warm", "start_seconds": 4, "ready_seconds": 7, "memory_mib": 900},
        ]
        last = report.starts({"starts": {"ours": rows}}).splitlines()[-1]
        assert last == "| rbln-vllm | 9.00 | 12.0 | 4.00 | 7.00 | 800 |"

    def test_serving_and_sharing(self) -> None:
        keys = ("ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s")
        figures = dict(zip(keys, (30, 50, 5, 6, 190), strict=True))
        table = report.serving({"loads": {"8": {"ours": [figures], "vllm_cpu": []}}})
        assert table.splitlines()[2:] == [
            "| 8 | rbln-vllm | 30.0 | 50.0 | 5.00 | 6.00 | 190 |",
            "| 8 | vLLM CPU | - | - | - | - | - |",
        ]
        shared = {"alone_tokens_per_s": [100], "together_tokens_per_s": [[40, 50]], "shares": [0.9]}
        assert report.sharing(shared).splitlines()[-1] == "| 100 | 40.0 + 50.0 | 90 % |"
        assert report.sharing({}) == "not measured"

    def test_tables_of_a_whole_run(self) -> None:
        decode = section({"decode_b1": {"ours": [5.0]}}, [DecodeStep(1)])
        found = report.tables({"sections": {"decode": decode, "sharing": {}}})
        assert set(found) == {"limits", "peers", "sharing"}
        assert found["limits"] == "Limits: decode reading 80 GB/s, bf16 900 GFLOP/s."
        assert "not measured" in report.limits_text({"sections": {}})

    def test_only_what_stands_between_markers_is_replaced(self) -> None:
        page = "a\n<!-- peers -->\nold\n<!-- end peers -->\nb\n<!-- limits -->\nno end"
        filled = report.fill(page, {"peers": "new", "limits": "x", "absent": "y"})
        assert filled == page.replace("old", "new")
        assert report.fill(filled, {"peers": "new"}) == filled

    def test_uneven_table_is_refused(self) -> None:
        with pytest.raises(ValueError, match="as many cells"):
            report.markdown_table(["a", "b"], [["1"]])

    def test_numbers(self) -> None:
        shown = [report.number(value) for value in (None, 0.123, 45.67, -3.0, 12345.6)]
        assert shown == ["-", "0.12", "45.7", "-3.00", "12,346"]

    def test_series_of_a_plot(self) -> None:
        data = section(
            {
                "decode_b1": {"ours": [4.0]},
                "decode_b8": {"ours": [None]},
                "prefill_9": {"ours": [1]},
            },
            [DecodeStep(1), DecodeStep(8), Prefill(9)],
        )
        found = plots.series(report.rows_of(data), "decode_b", lambda row: row.median("ours"))
        assert found == ([1], [4.0])
