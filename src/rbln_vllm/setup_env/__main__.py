# SPDX-License-Identifier: Apache-2.0
"""Check and mend this Python environment. Safe to run again; exits 1 when torch is unusable."""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from .torch_build import (
    broken_companions,
    build_problem,
    import_problem,
    torch_directory,
    uninstall,
)
from .vllm_metadata import ensure_vllm_metadata, installed_version


def main(argv: list[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rbln_vllm.setup_env", description=__doc__)
    parser.add_argument(
        "--torch-build", action="store_true", help="only check that torch is built for CPU"
    )
    options = parser.parse_args(argv)
    problem = build_problem(torch_directory())
    if problem is None and not options.torch_build:
        problem = import_problem()
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if not options.torch_build:
        remove_broken_companions()
        print(ensure_vllm_metadata(Path(sysconfig.get_path("purelib"))))
    return 0


def remove_broken_companions() -> None:
    """Uninstall torchvision, torchaudio and torchcodec where they do not import, saying so."""
    broken = broken_companions(lambda name: installed_version(name) is not None)
    for name, reason in broken.items():
        print(f"removing {name}: it fails to import beside the installed torch ({reason})")
    if broken:
        uninstall(list(broken))


if __name__ == "__main__":
    sys.exit(main())
