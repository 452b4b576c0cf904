# SPDX-License-Identifier: Apache-2.0
"""Build rbln_host._native with AddressSanitizer and UBSan, and run the kernel tests against it.

usage: .venv/bin/python scripts/sanitize.py [PYTEST_ARGUMENT...]   (for other tests or options)

The module goes into build/sanitize, beside links to the Python sources of rbln_host; the normal one
stays as it is. Any report ends the run with its stack on standard error and a failing exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "rbln_host"
BUILD = ROOT / "build" / "sanitize"
SITE = BUILD / "site"
TESTS = "tests/unit/host/native"
# The interpreter keeps memory until it ends, which LeakSanitizer would report.
ASAN_OPTIONS = "detect_leaks=0:strict_string_checks=1:check_initialization_order=1"
UBSAN_OPTIONS = "print_stacktrace=1"


def build() -> None:
    """Compile the module into SITE; only what has changed since the last time."""
    tools = Path(sys.executable).parent
    defines = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "Python_EXECUTABLE": sys.executable,
        "RBLN_MODULE_DIR": SITE / "rbln_host",
        "RBLN_SANITIZE": "ON",
    }
    options = [f"-D{name}={value}" for name, value in defines.items()]
    cmake = str(tools / "cmake")
    configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), *options]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(BUILD)], check=True)


def link_python_sources() -> None:
    """Make SITE an importable rbln_host: the sanitized module and links to all the rest."""
    package = SITE / "rbln_host"
    for link in package.iterdir():
        if link.is_symlink():
            link.unlink()
    for source in SOURCES.iterdir():
        if source.suffix != ".so" and source.name != "__pycache__":
            (package / source.name).symlink_to(source)


def library(name: str) -> str:
    """The compiler's own copy of a runtime library."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def environment() -> dict[str, str]:
    """Variables under which an interpreter that is not sanitized itself runs the module."""
    # The sanitizer must come before every other library, and it looks for the C++ library's
    # __cxa_throw when it starts, before torch has brought that library along.
    preload = [library("libasan.so"), library("libstdc++.so")]
    return {
        **os.environ,
        "ASAN_OPTIONS": ASAN_OPTIONS,
        "UBSAN_OPTIONS": UBSAN_OPTIONS,
        "LD_PRELOAD": " ".join(preload),
        "PYTHONPATH": str(SITE),
    }


def main(arguments: list[str]) -> int:
    """Build and test; returns the exit code of pytest."""
    build()
    link_python_sources()
    variables = environment()
    where = [sys.executable, "-c", "from rbln_host import _native; print(_native.__file__)"]
    loaded = subprocess.run(where, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    if not loaded.stdout.startswith(str(SITE)):
        print(f"error: the tests would load {loaded.stdout}", file=sys.stderr)
        return 1
    # pytest's own handling of crashes and of file descriptor 2 would hide the sanitizer's report.
    options = ["-p", "no:faulthandler", "--capture=sys"]
    command = [sys.executable, "-m", "pytest", *options, *(arguments or [TESTS])]
    return subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
