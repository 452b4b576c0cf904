# SPDX-License-Identifier: Apache-2.0
"""What the command line says when it stops: one line on stderr."""

import argparse
from typing import NoReturn

BAD_INPUT = 2
"""Exit code of a command that was given something it cannot use."""
FAILED = 1
"""Exit code of a command that could not do what it was asked."""


class CommandError(Exception):
    """Ends the command with this message and exit code."""

    def __init__(self, message: str, code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog.removeprefix('rbln-vllm ')}: {one_line(message)}")


def one_line(message: object) -> str:
    """``message`` without line breaks."""
    return " ".join(str(message).split())
