# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run: decode step against batch and against context.

usage: python -m benchmarks.plots RESULT_JSON OUT_PREFIX     in an environment that has matplotlib
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Row, limits_of, rows_of
from benchmarks.systems import OURS, SYSTEMS

# Section -> start of the names of its probes, and what the number after it means.
PLOTS = {"decode": ("decode_b", "batch"), "context": ("context_", "context (tokens)")}


def series(
    rows: Mapping[str, Row], prefix: str, value: Callable[[Row], float | None]
) -> tuple[list[int], list[float]]:
    """Numbers after `prefix` in the probes' names, and the value of each that has one."""
    found = [
        (int(name.removeprefix(prefix)), value(row))
        for name, row in rows.items()
        if name.startswith(prefix)
    ]
    points = [(x, y) for x, y in found if y is not None]
    return [x for x, _ in points], [y for _, y in points]


def draw(results: Mapping[str, Any], section: str, out: Path) -> None:
    """One PNG: a line per system, and the machine's limit dashed."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    prefix, axis = PLOTS[section]
    found = results["sections"][section]
    rows, limits = rows_of(found), limits_of(found)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    plot = figure.add_subplot()
    for name in (name for name in SYSTEMS if name in results["sections"][section]["systems"]):
        x, y = series(rows, prefix, _median_of(name))
        width = 2.5 if name == OURS else 1.2
        plot.plot(x, y, marker="o", linewidth=width, label=SYSTEMS[name].label)
    if limits is not None:
        x, y = series(rows, prefix, lambda row: row.at_limit(limits))
        plot.plot(x, y, linestyle="--", color="grey", label="limit of the machine")
    plot.set(xlabel=axis, ylabel="decode step (ms)", ylim=(0, None))
    plot.set_xticks(x, [f"{tick:,}" for tick in x])
    plot.grid(alpha=0.3)
    plot.legend()
    figure.savefig(out, dpi=120)
    print(f"written: {out}")


def _median_of(system: str) -> Callable[[Row], float | None]:
    return lambda row: row.median(system)


def main(arguments: Sequence[str]) -> int:
    """Draw what the run has; returns the exit code."""
    results = json.loads(Path(arguments[0]).read_text())
    for section in PLOTS:
        if section in results["sections"]:
            draw(results, section, Path(f"{arguments[1]}-{section}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
