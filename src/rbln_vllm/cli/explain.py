# SPDX-License-Identifier: Apache-2.0
"""``rbln-vllm programs --explain``: what compiled programs cost and how much of them is native."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rbln_vllm.cli.text_table import byte_size, text_table
from rbln_vllm.toolchain import ProgramReport

_TITLES = (
    "PROGRAM",
    "COMMANDS",
    "NATIVE",
    "GFLOP",
    "NATIVE",
    "ATTENTION",
    "ARENA",
    "WEIGHTS",
)
_NOTE = (
    "GFLOP is of matrix products; ATTENTION has its own, at the longest context. NATIVE is the "
    "share of\nthe column before it that our kernels do; the rest falls back to torch."
)


def explanation_text(names: Sequence[str], reports: Mapping[str, ProgramReport]) -> str:
    """Tables for people: costs, fallbacks, and which of ``names`` are not compiled yet."""
    compiled = [reports[name] for name in names if name in reports]
    parts = []
    if compiled:
        parts += [text_table(_TITLES, [_row(report) for report in compiled]), _NOTE]
        parts.append(_fallbacks(compiled))
    missing = [name for name in names if name not in reports]
    if missing:
        parts.append(f"Not compiled yet, so nothing is known of: {', '.join(missing)}")
    return "\n\n".join(parts)


def explanation_facts(
    names: Sequence[str], reports: Mapping[str, ProgramReport]
) -> dict[str, dict[str, Any] | None]:
    """As JSON: a program's costs, None for one that is not compiled yet."""
    return {name: reports[name].facts() if name in reports else None for name in names}


def _row(report: ProgramReport) -> tuple[str, ...]:
    return (
        report.name,
        str(report.commands),
        _share(report.native_commands, report.commands),
        f"{report.flops / 1e9:.3f}",
        _share(report.native_flops, report.flops),
        f"{report.attention_flops / 1e9:.3f}",
        byte_size(report.arena_bytes),
        byte_size(report.weight_bytes),
    )


def _fallbacks(reports: Sequence[ProgramReport]) -> str:
    places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for report in reports:
        for fallback in report.fallbacks:
            places[fallback.operator, fallback.reason].append(fallback.commands)
    if not places:
        return "No command falls back to torch."
    rows = [
        (operator, str(sum(counts)), str(len(counts)), reason)
        for (operator, reason), counts in sorted(places.items())
    ]
    return text_table(("FALLBACK", "COMMANDS", "PROGRAMS", "REASON"), rows)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
