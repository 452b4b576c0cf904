# SPDX-License-Identifier: Apache-2.0
"""The lock files agree with the project's own requirements."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rbln_vllm.distributed.kv_transfer.lmcache import LMCACHE_VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
HOST = [*PROJECT["project"]["dependencies"], *EXTRAS["host"]]
CONNECTORS = [*EXTRAS["kv_connectors"], f"lmcache=={LMCACHE_VERSION}"]
DEV = [*EXTRAS["dev"], *PROJECT["build-system"]["requires"]]


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    matches = [
        re.fullmatch(r"([a-z0-9-]+)==(\S+)( ; platform_machine == \"x86_64\")?", line)
        for line in lines
    ]
    assert all(matches), "every line is name==version"
    return {match[1]: match[2] for match in matches if match}


@pytest.mark.parametrize(
    ("requirement", "file"),
    [(text, "host.txt") for text in HOST]
    + [(text, "dev.txt") for text in DEV]
    + [(text, "kv_connectors.txt") for text in CONNECTORS],
)
def test_requirement_is_pinned_within_its_bounds(requirement: str, file: str) -> None:
    wanted = Requirement(requirement)
    # The files are installed one after the other.
    pinned = pins("host.txt") if file == "host.txt" else pins("host.txt") | pins(file)
    assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)])


def test_files_share_no_package_and_hold_no_cuda_build() -> None:
    host, dev, connectors = pins("host.txt"), pins("dev.txt"), pins("kv_connectors.txt")
    assert not host.keys() & (dev | connectors).keys()
    assert all(dev.get(name, version) == version for name, version in connectors.items())
    unwanted = ("torchvision", "torchaudio", "torchcodec", "nvidia", "cu")
    assert not [name for name in host | dev | connectors if name.startswith(unwanted)]
