# SPDX-License-Identifier: Apache-2.0
"""Tables of a run, in Markdown, from its JSON alone.

usage: python -m benchmarks.report RESULT_JSON [--into PAGE]

Prints the tables. With --into they replace what stands between `<!-- NAME -->` and
`<!-- end NAME -->` in a page, for each table whose markers are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.costs import Limits, Work
from benchmarks.environment import write_result
from benchmarks.limits import best
from benchmarks.systems import OURS, SYSTEMS

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One probe's figures, a value per round and system; None where a system had failed."""

    label: str
    higher_is_better: bool
    work: Work
    samples: Mapping[str, Sequence[float | None]]

    def median(self, system: str) -> float | None:
        """None when the system has no figure."""
        values = [value for value in self.samples.get(system, ()) if value is not None]
        return statistics.median(values) if values else None

    def ratios(self, peer: str) -> list[float]:
        """How many times better ours is than a peer, in each round that has both.

        A disturbed round can give a time below zero, of which no ratio says anything.
        """
        pairs = zip(self.samples.get(OURS, ()), self.samples.get(peer, ()), strict=False)
        found = [(a, b) for a, b in pairs if a is not None and b is not None and min(a, b) > 0]
        if self.higher_is_better:
            return [ours / theirs for ours, theirs in found]
        return [theirs / ours for ours, theirs in found]

    def at_limit(self, limits: Limits) -> float:
        """The figure of a perfect engine."""
        seconds = limits.seconds(self.work)
        return self.work.tokens / seconds if self.higher_is_better else seconds * 1e3

    def share(self, system: str, limits: Limits) -> float | None:
        """Of the limit, 1 being perfect."""
        value = self.median(system)
        if value is None or value <= 0:
            return None
        limit = self.at_limit(limits)
        return value / limit if self.higher_is_better else limit / value


def rows_of(section: Json) -> dict[str, Row]:
    """Probe name -> its row."""
    return {
        probe["name"]: Row(
            label=probe["label"],
            higher_is_better=probe["higher_is_better"],
            work=Work(probe["read_bytes"], probe["flop"], probe["tokens"]),
            samples=section["samples"][probe["name"]],
        )
        for probe in section["probes"]
    }


def limits_of(section: Json) -> Limits | None:
    """The best of a section's own samples, None when it has none.

    A shared machine's bandwidth differs by the hour, so another section's samples say nothing.
    """
    samples = section.get("limits", ())
    return best(samples) if samples else None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Raises ValueError for a row of another width than the header."""
    if any(len(row) != len(header) for row in rows):
        raise ValueError("every row needs as many cells as the header")
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    """Three digits that say something; a dash for nothing."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f} %"


def comparison(section: Json) -> str:
    """Figures of every system; a peer's has how many times better ours is beside it."""
    limits = limits_of(section)
    systems = [name for name in SYSTEMS if name in section["systems"]]
    header = ["", "limit", *(SYSTEMS[name].label for name in systems)]
    table = []
    for row in rows_of(section).values():
        limit = number(row.at_limit(limits)) if limits else "-"
        table.append([row.label, limit, *(_cell(row, name, limits) for name in systems)])
    memory = [number(section["memory_mib"].get(name)) for name in systems]
    return markdown_table(header, [*table, ["memory after that (MiB)", "-", *memory]])


def _cell(row: Row, system: str, limits: Limits | None) -> str:
    value = number(row.median(system))
    if system == OURS:
        share = row.share(OURS, limits) if limits else None
        return f"**{value}** ({percent(share)} of limit)"
    ratios = row.ratios(system)
    if not ratios:
        return value
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    return f"{value} ({statistics.median(ratios):.2f}x; {spread})"


def growth(section: Json) -> str:
    """What a longer context adds to a step, beside the time that reading its KV cache takes."""
    limits = limits_of(section)
    rows = list(rows_of(section).values())
    rows = [row for row in rows if row.label.startswith("decode step, batch 1, context")]
    systems = [name for name in SYSTEMS if name in section["systems"]]
    header = ["added to a step (ms)", "KV bytes / bandwidth"]
    header += [SYSTEMS[name].label for name in systems]
    table = []
    for row in rows[1:]:
        added_bytes = row.work.read_bytes - rows[0].work.read_bytes
        least = added_bytes / limits.bytes_per_s * 1e3 if limits else None
        cells = [_growth_cell(rows[0], row, name, least) for name in systems]
        table.append(
            [row.label.removeprefix("decode step, ").removesuffix(" (ms)"), number(least), *cells]
        )
    return markdown_table(header, table)


def _growth_cell(short: Row, long: Row, system: str, least: float | None) -> str:
    pairs = zip(short.samples.get(system, ()), long.samples.get(system, ()), strict=False)
    added = [b - a for a, b in pairs if a is not None and b is not None]
    if not added:
        return "-"
    middle = statistics.median(added)
    share = least / middle if least and middle > 0 else None
    return f"{number(middle)} ({percent(share)} of bandwidth)"


def starts(section: Json) -> str:
    """Seconds from `LLM(...)` to ready, and memory then."""
    table = []
    for name, found in section["starts"].items():
        cells = [SYSTEMS[name].label]
        for kind in ("cold", "warm"):
            chosen = [start for start in found if start["kind"] == kind]
            for key in ("start_seconds", "ready_seconds"):
                cells.append(number(_median(chosen, key)))
        table.append([*cells, number(_median(found, "memory_mib"))])
    header = ["", "cold (s)", "with process and imports (s)", "warm (s)"]
    header += ["with process and imports (s)", "memory when ready (MiB)"]
    return markdown_table(header, table)


def _median(rows: Sequence[Json], key: str) -> float | None:
    return statistics.median(row[key] for row in rows) if rows else None


def serving(section: Json) -> str:
    """Medians over rounds of what the client saw."""
    table = []
    for concurrency, loads in section["loads"].items():
        for name, rounds in loads.items():
            keys = ("ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s")
            figures = [number(_median(rounds, key)) for key in keys]
            table.append([concurrency, SYSTEMS[name].label, *figures])
    header = ["concurrency", "", "TTFT (ms)", "p99", "TPOT (ms)", "p99", "output tok/s"]
    return markdown_table(header, table)


def sharing(section: Json) -> str:
    """Throughputs alone and together."""
    if not section:
        return "not measured"
    together = [
        statistics.median(rates) for rates in zip(*section["together_tokens_per_s"], strict=True)
    ]
    row = [
        number(statistics.median(section["alone_tokens_per_s"])),
        " + ".join(number(rate) for rate in together),
        percent(statistics.median(section["shares"])),
    ]
    return markdown_table(["alone (tok/s)", "two at once (tok/s)", "sum of one alone"], [row])


def limits_text(results: Json) -> str:
    """The machine's limits while each section was taken, in a sentence."""
    measured = {name: s for name, s in results["sections"].items() if s.get("limits")}
    if not measured:
        return "The limits of the machine were not measured."
    return f"Limits: {'; '.join(_limits_phrase(*item) for item in measured.items())}."


def _limits_phrase(name: str, section: Json) -> str:
    limits = best(section["limits"])
    kinds = " and ".join(sorted({sample["matrix_kind"] for sample in section["limits"]}))
    reading = f"{name} reading {limits.bytes_per_s / 1e9:.0f} GB/s"
    return f"{reading}, {kinds} {limits.flop_per_s / 1e9:,.0f} GFLOP/s"


def tables(results: Json) -> dict[str, str]:
    """Name of a marker -> Markdown, for the sections that a run has."""
    sections = results["sections"]
    makers: dict[str, tuple[str, Callable[[Json], str]]] = {
        "peers": ("decode", comparison),
        "context": ("context", comparison),
        "context-growth": ("context", growth),
        "large": ("large", comparison),
        "large-growth": ("large", growth),
        "starts": ("starts", starts),
        "serving": ("serving", serving),
        "sharing": ("sharing", sharing),
    }
    found = {"limits": limits_text(results)}
    for name, (section, make) in makers.items():
        if section in sections:
            found[name] = make(sections[section])
    return found


def fill(page: str, found: Mapping[str, str]) -> str:
    """A page with what stands between its markers replaced."""
    for name, text in found.items():
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, opened, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if opened and closed:
            page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """What :func:`publish` is told."""
    parser.add_argument("--json", type=Path)
    parser.add_argument("--into", type=Path, help="page to write the table into")


def publish(options: argparse.Namespace, name: str, table: str, result: dict[str, Any]) -> None:
    """Print the table of a benchmark; write its result and fill its page where they are asked for.

    ``name`` is that of the page's markers, see :func:`fill`.
    """
    print(table)
    if options.json:
        write_result(options.json, result)
    if options.into:
        options.into.write_text(fill(options.into.read_text(), {name: table}))
        print(f"written: {options.into}")


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    found = tables(json.loads(options.result.read_text()))
    print(as_page(found))
    if options.into:
        options.into.write_text(fill(options.into.read_text(), found))
        print(f"written: {options.into}")
    return 0


def as_page(found: Mapping[str, str]) -> str:
    """All tables under their names."""
    return "\n\n".join(f"### {name}\n\n{text}" for name, text in found.items())


if __name__ == "__main__":
    sys.exit(main())
