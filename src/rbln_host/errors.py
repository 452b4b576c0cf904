# SPDX-License-Identifier: Apache-2.0
"""Errors of the toolchain."""


class ToolchainError(Exception):
    """Base of every error the toolchain raises on purpose."""


class CaptureError(ToolchainError):
    """A module could not be turned into a program."""


class ArtifactError(ToolchainError):
    """An artifact is missing, incomplete, altered or of another format; it must be rebuilt."""


class CacheBusyError(ToolchainError):
    """A cache entry cannot be removed now: a process is compiling it."""


class MissingProgramError(ToolchainError):
    """A program was asked for that the loaded artifact does not hold."""


class ExecutorError(ToolchainError):
    """This machine cannot run programs the way that was asked for."""
