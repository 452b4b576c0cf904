# SPDX-License-Identifier: Apache-2.0
"""`rbln-vllm programs --explain`: costs, fallbacks, and what is not compiled yet."""

import json
from dataclasses import replace

from rbln_host.runtime.report import FallbackReport
from rbln_vllm.cli.explain import explanation_facts, explanation_text
from rbln_vllm.toolchain import ProgramReport

DECODE = ProgramReport(
    name="decode_b1_q1",
    commands=242,
    native_commands=242,
    flops=212_336_640,
    native_flops=212_336_640,
    attention_flops=70_778_880,
    arena_bytes=6528,
    weight_bytes=270 << 20,
    fallbacks=(),
)
PARTLY = replace(
    DECODE,
    name="prefill_b1_q128",
    native_commands=121,
    native_flops=0,
    fallbacks=(FallbackReport("aten::mm", "no kernel does this", 120),),
)


def test_costs() -> None:
    text = explanation_text(["decode_b1_q1"], {"decode_b1_q1": DECODE})
    title, row = (line.split() for line in text.splitlines()[:2])
    assert title[:3] == ["PROGRAM", "COMMANDS", "NATIVE"]
    assert row == [
        *("decode_b1_q1", "242", "100.0%", "0.212", "100.0%", "0.071"),
        *("6.4", "KiB", "270.0", "MiB"),
    ]
    assert "No command falls back to torch." in text
    assert "Not compiled" not in text


def test_fallbacks_are_summed_over_programs() -> None:
    reports = {"a": replace(PARTLY, name="a"), "b": replace(PARTLY, name="b"), "c": DECODE}
    text = explanation_text(["a", "b", "c"], reports)
    assert "50.0%" in text
    row = next(line for line in text.splitlines() if line.startswith("aten::mm"))
    assert row.split(maxsplit=3) == ["aten::mm", "240", "2", "no kernel does this"]


def test_what_is_not_compiled_yet() -> None:
    text = explanation_text(["a", "b"], {})
    assert text == "Not compiled yet, so nothing is known of: a, b"
    mixed = explanation_text(["a", "decode_b1_q1"], {"decode_b1_q1": DECODE})
    assert mixed.endswith("nothing is known of: a")


def test_as_json() -> None:
    facts = explanation_facts(["a", "decode_b1_q1"], {"decode_b1_q1": DECODE})
    assert facts == json.loads(json.dumps(facts))
    assert facts["a"] is None
    assert facts["decode_b1_q1"] is not None
    assert facts["decode_b1_q1"]["commands"] == 242


def test_no_commands() -> None:
    nothing = replace(DECODE, commands=0, native_commands=0, flops=0, native_flops=0)
    text = explanation_text(["decode_b1_q1"], {"decode_b1_q1": nothing})
    assert text.splitlines()[1].split()[:5] == ["decode_b1_q1", "0", "-", "0.000", "-"]
