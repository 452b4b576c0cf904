# SPDX-License-Identifier: Apache-2.0
"""A digest of the code a program is made by, so that an edit to it is a new cache key."""

from functools import cache
from pathlib import Path
from types import ModuleType

import blake3


@cache
def digest_packages(packages: tuple[ModuleType, ...]) -> str:
    """Digest of every Python file of ``packages``, by relative name and content."""
    hasher = blake3.blake3()
    for package in packages:
        for root in package.__path__:
            for path in sorted(Path(root).rglob("*.py")):
                hasher.update(f"{package.__name__}/{path.relative_to(root)}".encode())
                hasher.update(path.read_bytes())
    return str(hasher.hexdigest())[:12]
