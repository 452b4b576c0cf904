# SPDX-License-Identifier: Apache-2.0
"""Create a virtual environment with every release pinned in requirements/ and this project.

usage: setup_venv.py VENV_DIR         (standard library only; run it with Python 3.11)

Safe to run again: what is installed already stays. Pip's own output is shown only when it fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOST = ROOT / "requirements" / "host.txt"
DEV = ROOT / "requirements" / "dev.txt"
KV_CONNECTORS = ROOT / "requirements" / "kv_connectors.txt"
PINNED_FOR = (3, 11)
BUILD_TOOLS = ("cmake", "nanobind", "ninja", "packaging", "pathspec", "scikit-build-core")


class SetupError(Exception):
    """A step failed; the text says what to do."""


class Environment:
    """The virtual environment that is being filled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        self._project: subprocess.Popen[str] | None = None

    def create(self) -> None:
        """Create the environment unless it has a working interpreter of the right version."""
        test = f"import pip, sys; sys.exit(sys.version_info[:2] != {PINNED_FOR})"
        if (
            self.python.exists()
            and subprocess.run([self.python, "-c", test], check=False).returncode == 0
        ):
            return
        done = run([sys.executable, "-m", "venv", "--clear", str(self.directory)])
        if done.returncode != 0:
            raise SetupError(
                f"{done.stdout}\nPython's venv module failed. On Debian and Ubuntu it is a package "
                "of its own: install python3.11-venv."
            )

    def install_torch(self) -> None:
        """Install torch alone, before the large rest, and check that it is a build for CPU."""
        self.pip_install([pin_of("torch")], packages=1)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        check = [str(self.python), "-m", "rbln_vllm.setup_env", "--torch-build"]
        done = run(check, environment)
        if done.returncode != 0:
            run([str(self.python), "-m", "pip", "uninstall", "--yes", "torch"])
            raise SetupError(f"{done.stdout.strip()}\n(this torch has been uninstalled again)")

    def install_locked(self, lock: Path) -> None:
        """Install the releases of a lock file and nothing they ask for beyond it."""
        self.pip_install(["-r", str(lock)], packages=len(pins(lock)))

    def start_project(self) -> None:
        """Begin to install this project editable, with the tools that are pinned to build it.

        To compile its native executor takes a minute or two of a processor, which the packages
        leave idle: so it goes on beside them, in a process group of its own.
        """
        self.pip_install([pin_of(name) for name in BUILD_TOOLS], packages=len(BUILD_TOOLS))
        self._project = subprocess.Popen(
            self.pip_command(["--no-build-isolation", "-e", str(ROOT)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish_project(self) -> None:
        """Wait for what `start_project` began."""
        assert self._project is not None
        output, _ = self._project.communicate()
        if self._project.returncode != 0:
            raise SetupError(f"{output[-8000:]}\nthis project could not be installed, see above")

    def stop(self) -> None:
        """End what still goes on beside the steps."""
        if self._project is not None and self._project.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._project.pid, signal.SIGTERM)
            self._project.communicate()

    def repair(self) -> None:
        """Mend what the registry's packages get wrong beside each other."""
        command = [str(self.python), "-m", "rbln_vllm.setup_env"]
        if subprocess.run(command, check=False).returncode != 0:
            raise SetupError("the environment is not usable, see above")

    def pip_install(self, arguments: list[str], packages: int) -> None:
        """`pip install --no-deps` with a counter in place of pip's output."""
        command = self.pip_command(arguments)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        output = show_progress(process.stdout, packages)
        if process.wait() != 0:
            raise SetupError("".join(output[-30:]) + f"\npip failed: {' '.join(command)}")

    def pip_command(self, arguments: list[str]) -> list[str]:
        """`pip install --no-deps` of this environment, without questions and bars."""
        command = [str(self.python), "-m", "pip", "install", "--no-deps", "--no-input"]
        return [*command, "--progress-bar", "off", "--disable-pip-version-check", *arguments]


def check_compiler() -> None:
    """Ask for a C++ compiler before anything is downloaded."""
    names = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    if not any(name and shutil.which(name) for name in names):
        raise SetupError(
            "no C++ compiler is on the PATH, and CXX names none. On Debian and Ubuntu: install g++."
        )


def run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with its output kept in `stdout`."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )


def pins(lock: Path) -> list[str]:
    """The requirement lines of a lock file."""
    lines = (line.strip() for line in lock.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pin_of(name: str) -> str:
    """The line of host.txt or dev.txt for one distribution."""
    return next(line for line in pins(HOST) + pins(DEV) if line.startswith(f"{name}=="))


def show_progress(lines: Iterable[str], packages: int) -> list[str]:
    """Count pip's packages: one line rewritten on a terminal, some lines elsewhere."""
    seen: list[str] = []
    count = 0
    live = sys.stdout.isatty()
    for line in lines:
        seen.append(line)
        start = re.match(
            r"(Collecting|Processing|Requirement already satisfied:|Obtaining) (\S+)", line
        )
        if start:
            count += 1
            report(
                f"{count}/{packages} {start[2].rsplit('/', 1)[-1]}", live, milestone=count % 50 == 0
            )
        elif line.startswith("Installing collected packages"):
            report("installing what was downloaded", live, milestone=packages > 1)
    if live:
        print("\r\033[K", end="")
    return seen


def report(text: str, live: bool, milestone: bool) -> None:
    """Show progress: in place on a terminal, else only at milestones."""
    if live:
        print(f"\r\033[K      {text}", end="", flush=True)
    elif milestone:
        print(f"      {text}", flush=True)


def main(argv: list[str]) -> int:
    """Run all steps; returns the exit code."""
    if sys.version_info[:2] != PINNED_FOR:
        wanted = ".".join(map(str, PINNED_FOR))
        print(f"error: the pinned releases are for Python {wanted}, this is {sys.version}")
        return 1
    environment = Environment(Path(argv[0]))
    try:
        return take(steps_of(environment))
    finally:
        environment.stop()


def steps_of(environment: Environment) -> list[tuple[str, Callable[[], None]]]:
    """What is done, in order, and how each step is called."""
    return [
        ("C++ compiler", check_compiler),
        (f"virtual environment {environment.directory}", environment.create),
        (f"{pin_of('torch')} for CPU", environment.install_torch),
        ("build tools; compiling begins in the background", environment.start_project),
        ("vLLM for CPU and what it needs", lambda: environment.install_locked(HOST)),
        ("tools for build, tests and demonstration model", lambda: environment.install_locked(DEV)),
        ("LMCache, without CUDA", lambda: environment.install_locked(KV_CONNECTORS)),
        ("this project and its native executor", environment.finish_project),
        ("checks and repairs", environment.repair),
    ]


def take(steps: list[tuple[str, Callable[[], None]]]) -> int:
    """Take all steps, until one fails; returns the exit code."""
    for number, (title, step) in enumerate(steps, start=1):
        print(f"[{number}/{len(steps)}] {title}", flush=True)
        try:
            step()
        except SetupError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
