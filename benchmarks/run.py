# SPDX-License-Identifier: Apache-2.0
"""Measure this project beside its peers on one machine: `make bench`.

usage: python -m benchmarks.run MODEL [--rounds N] [--sections NAME...] [--systems NAME...] ...

Writes JSON (after each section, so that an interrupted run keeps what it has), tables in Markdown
and plots. Install peers first: `make peers`. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import plan
from benchmarks.environment import environment
from benchmarks.measure import Notes
from benchmarks.paths import ENVIRONMENTS, RESULTS, ROOT
from benchmarks.report import as_page, tables
from benchmarks.sections import SECTIONS, Bench
from benchmarks.systems import OURS, SYSTEMS

PLOT_SECONDS = 300


def main() -> int:
    """Entry point; returns the exit code."""
    options = parse(sys.argv[1:])
    # A termination must leave through the `with` blocks that end the engines.
    signal.signal(signal.SIGTERM, _leave)
    notes = Notes()
    bench = Bench(
        options.model,
        options.systems,
        (plan.quick if options.quick else plan.full)(options.rounds),
        seconds=options.seconds,
        notes=notes,
    )
    results = _results(options.out, options.keep)
    for name in options.sections:
        print(f"== {name}", flush=True)
        results["sections"][name] = _section(bench, name, notes)
        _write(options.out, results)
    page = as_page(tables(results))
    options.out.with_suffix(".md").write_text(page + "\n")
    print(page)
    _plot(options.out)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits with 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the main section")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=600.0, help="bound of one answer")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--quick", action="store_true", help="only see that everything works")
    parser.add_argument("--keep", action="store_true", help="keep other sections of --out")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if OURS not in options.systems:
        options.systems = [OURS, *options.systems]
    return options


def _section(bench: Bench, name: str, notes: Notes) -> dict[str, Any]:
    began, seen, taken_on = time.monotonic(), len(notes.lines), environment()
    found = SECTIONS[name](bench)
    minutes = round((time.monotonic() - began) / 60, 1)
    print(f"{name}: {minutes} min", flush=True)
    return {"environment": taken_on, "minutes": minutes, "notes": notes.lines[seen:], **found}


def _results(out: Path, keep: bool) -> dict[str, Any]:
    """What the run adds its sections to."""
    results: dict[str, Any] = {"benchmark": "peers", "sections": {}}
    return json.loads(out.read_text()) if keep and out.exists() else results


def _write(out: Path, results: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {out}", flush=True)


def _plot(out: Path) -> None:
    python = ENVIRONMENTS / "plots" / "bin" / "python"
    if not python.exists():
        print("note: no plots, matplotlib is not installed: `make peers`")
        return
    command = [str(python), "-m", "benchmarks.plots", str(out), str(out.with_suffix(""))]
    subprocess.run(command, cwd=ROOT, timeout=PLOT_SECONDS, check=False)


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
