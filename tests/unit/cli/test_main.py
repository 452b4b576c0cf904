# SPDX-License-Identifier: Apache-2.0
"""`rbln-vllm`: which commands are ours, and how vLLM's are called."""

import sys
from types import ModuleType

import pytest

import rbln_vllm
from rbln_vllm import shims
from rbln_vllm.cli import cache, main, programs
from rbln_vllm.cli.errors import FAILED, CommandError, OneLineParser, one_line


@pytest.fixture
def vllm_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """vLLM's main, replaced by one that notes its command line; metadata is asked for first."""
    calls: list[list[str]] = []
    named: list[bool] = []

    def vllm_main() -> None:
        assert named, "vLLM's main would have ended for want of metadata"
        calls.append(list(sys.argv))

    module = ModuleType("vllm.entrypoints.cli.main")
    module.main = vllm_main  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(shims, "name_vllm_metadata", lambda: named.append(True))
    monkeypatch.setattr(main, "_check_platform", lambda: None)
    monkeypatch.setattr(sys, "argv", ["/bin/rbln-vllm", "of the test"])
    return calls


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "model", "--port", "8001", "--rbln-strict-programs"],
        ["bench", "serve", "--model", "x"],
        ["chat"],
        ["complete", "-q"],
        ["frobnicate"],
        ["serve", "--help=rblnconfig"],
    ],
)
def test_other_commands_are_vllms(arguments: list[str], vllm_calls: list[list[str]]) -> None:
    assert main.main(arguments) == 0
    assert vllm_calls == [["/bin/rbln-vllm", *arguments]]


def test_arguments_come_from_the_command_line(
    vllm_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["rbln-vllm", "chat", "--url", "x"])
    assert main.main() == 0
    assert vllm_calls == [["rbln-vllm", "chat", "--url", "x"]]


def test_vllms_exit_code_is_kept(
    vllm_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave() -> None:
        raise SystemExit(3)

    monkeypatch.setattr(sys.modules["vllm.entrypoints.cli.main"], "main", leave)
    with pytest.raises(SystemExit) as exit_info:
        main.main(["chat"])
    assert exit_info.value.code == 3


def test_vllms_list_of_commands(vllm_calls: list[list[str]]) -> None:
    assert main.main(["vllm-help"]) == 0
    assert vllm_calls == [["/bin/rbln-vllm", "--help"]]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 0
    output = capsys.readouterr().out
    assert all(command in output for command in ("serve", "programs", "cache list", "bench"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"rbln-vllm {rbln_vllm.__version__}, vLLM ")


@pytest.mark.parametrize(("name", "module"), [("cache", cache), ("programs", programs)])
def test_ours(name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(module, "run", given.append)
    assert main.main([name, "a", "--b"]) == 0
    assert given == [["a", "--b"]]


def test_errors_are_one_line_and_a_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise CommandError("cache: the disk is full", FAILED)

    monkeypatch.setattr(cache, "run", fail)
    assert main.main(["cache"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "rbln-vllm: cache: the disk is full\n"
    assert captured.out == ""


class _Missing:
    """A finder for which importing vLLM fails for want of a module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)


def without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(missing), *sys.meta_path])


def test_without_vllm_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("vllm", monkeypatch)
    assert main.main(["serve", "x"]) == 2
    error = capsys.readouterr().err
    assert error == "rbln-vllm: vLLM is not installed: pip install 'rbln-vllm[host]'\n"


def test_another_missing_module_is_not_taken_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without("uvloop", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="uvloop"):
        main.main(["serve", "x"])


class TestPlatform:
    def check(self, monkeypatch: pytest.MonkeyPatch, platform: object) -> None:
        class OurPlatform:
            pass

        theirs, ours = ModuleType("vllm.platforms"), ModuleType("rbln_vllm.platform")
        theirs.current_platform = platform or OurPlatform()  # type: ignore[attr-defined]
        ours.RblnPlatform = OurPlatform  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm.platforms", theirs)
        monkeypatch.setitem(sys.modules, "rbln_vllm.platform", ours)
        main._check_platform()

    def test_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(monkeypatch, None)

    def test_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class CpuPlatform:
            pass

        with pytest.raises(CommandError, match=r"platform CpuPlatform, not ours.*VLLM_PLUGINS"):
            self.check(monkeypatch, CpuPlatform())


class TestParser:
    def test_errors_are_one_line(self) -> None:
        parser = OneLineParser(prog="rbln-vllm cache")
        parser.add_argument("--count", type=int)
        with pytest.raises(
            CommandError, match=r"\Acache: argument --count: invalid int value: 'x'\Z"
        ):
            parser.parse_args(["--count", "x"])

    def test_one_line(self) -> None:
        assert one_line("a\n  b\tc \n") == "a b c"
