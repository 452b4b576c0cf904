# SPDX-License-Identifier: Apache-2.0
"""Who may know whom: the layer rules of the design, read from the source.

Each rule is a function from one file to what breaks it there, and is itself tried on a file that
breaks it: a rule that cannot fail would go unseen.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.unit.source_tree import Source, imports_of, sources

Rule = Callable[[Source], set[str]]

WITHOUT_VLLM = {"rbln_vllm/__init__.py", "rbln_vllm/programs.py"}
PACKAGES_WITHOUT_VLLM = ("rbln_vllm/devices/", "rbln_vllm/envs/", "rbln_vllm/optimum/")
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


def toolchain_knows_no_vllm(source: Source) -> set[str]:
    if not source.path.startswith("rbln_host/"):
        return set()
    names = source.imports()
    return imports_of(names, "vllm") | imports_of(names, "rbln_vllm")


def core_knows_no_torch(source: Source) -> set[str]:
    inside = source.path.startswith("rbln_vllm/core/")
    return imports_of(source.imports(), "torch") if inside else set()


def only_the_toolchain_boundary_knows_rbln_host(source: Source) -> set[str]:
    if source.path.startswith("rbln_host/") or source.path == "rbln_vllm/toolchain.py":
        return set()
    if source.path.startswith("rbln_vllm/toolchains/"):
        return set()
    found = imports_of(source.imports(), "rbln_host")
    if source.path.startswith("rbln_vllm/models/"):
        # Models are written in the operator set; `from rbln_host import ops` names both.
        operators = imports_of(found, "rbln_host.ops")
        return found - operators - ({"rbln_host"} if operators else set())
    return found


def only_envs_reads_the_environment(source: Source) -> set[str]:
    if source.path.startswith("rbln_vllm/envs/"):
        return set()
    attributes = {ast.unparse(n) for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)}
    reads = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    return (attributes | source.imports()) & reads


def light_modules_do_not_import_vllm(source: Source) -> set[str]:
    names = source.imports(at_import_time=True)
    light = source.path in WITHOUT_VLLM or source.path.startswith(PACKAGES_WITHOUT_VLLM)
    return imports_of(names, "vllm") if light else set()


def companions_of_torch_are_optional(source: Source) -> set[str]:
    names = source.imports(at_import_time=True)
    return set().union(*(imports_of(names, package) for package in BROKEN_BESIDE_CPU_TORCH))


def toolchain_unpickles_nothing(source: Source) -> set[str]:
    if not source.path.startswith("rbln_host/"):
        return set()
    names = source.imports()
    modules = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")
    found: set[str] = set().union(*(imports_of(names, module) for module in modules))
    calls = {ast.unparse(n.func) for n in ast.walk(source.tree) if isinstance(n, ast.Call)}
    return found | (calls | names) & {"torch.load", "torch.package", "torch.export.load"}


# Each rule with a file that breaks it and what it must report.
RULES: list[tuple[Rule, str, str, set[str]]] = [
    (toolchain_knows_no_vllm, "rbln_host/a.py", "def f():\n import vllm.envs", {"vllm.envs"}),
    (
        toolchain_knows_no_vllm,
        "rbln_host/a.py",
        "from rbln_vllm import envs",
        {"rbln_vllm", "rbln_vllm.envs"},
    ),
    (core_knows_no_torch, "rbln_vllm/core/a.py", "import torch.nn as nn", {"torch.nn"}),
    (
        only_the_toolchain_boundary_knows_rbln_host,
        "rbln_vllm/worker/a.py",
        "import importlib\nimportlib.import_module('rbln_host.cache')",
        {"rbln_host.cache"},
    ),
    (
        only_the_toolchain_boundary_knows_rbln_host,
        "rbln_vllm/models/a.py",
        "from rbln_host import ops, compiler",
        {"rbln_host.compiler"},
    ),
    (only_envs_reads_the_environment, "rbln_host/a.py", "import os\nos.getenv('A')", {"os.getenv"}),
    (
        only_envs_reads_the_environment,
        "rbln_vllm/a.py",
        "from os import environ",
        {"os.environ"},
    ),
    (light_modules_do_not_import_vllm, "rbln_vllm/envs/a.py", "import vllm", {"vllm"}),
    (light_modules_do_not_import_vllm, "rbln_vllm/optimum/a.py", "import vllm", {"vllm"}),
    (
        companions_of_torch_are_optional,
        "rbln_vllm/a.py",
        "try:\n import torchvision\nexcept ImportError: pass",
        {"torchvision"},
    ),
    (toolchain_unpickles_nothing, "rbln_host/a.py", "import pickle", {"pickle"}),
    (toolchain_unpickles_nothing, "rbln_host/a.py", "torch.load('a')", {"torch.load"}),
]


@pytest.mark.parametrize(
    "rule", dict.fromkeys(rule for rule, *_ in RULES), ids=lambda rule: rule.__name__
)
def test_source_keeps_to(rule: Rule) -> None:
    broken = {source.path: found for source in sources() if (found := rule(source))}
    assert broken == {}


@pytest.mark.parametrize(("rule", "path", "text", "reported"), RULES)
def test_rule_reports_a_breach(rule: Rule, path: str, text: str, reported: set[str]) -> None:
    assert rule(Source(path, text)) == reported


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (light_modules_do_not_import_vllm, "rbln_vllm/envs/a.py", "def f():\n import vllm"),
        (
            light_modules_do_not_import_vllm,
            "rbln_vllm/envs/a.py",
            "if TYPE_CHECKING:\n from vllm import LLM",
        ),
        (companions_of_torch_are_optional, "rbln_vllm/a.py", "def f():\n import torchaudio"),
        (
            only_the_toolchain_boundary_knows_rbln_host,
            "rbln_vllm/models/a.py",
            "from rbln_host import ops\nfrom rbln_host.ops.norm import rms_norm",
        ),
        (core_knows_no_torch, "rbln_vllm/core/a.py", "from rbln_vllm.core import torches"),
    ],
)
def test_rule_allows(rule: Rule, path: str, text: str) -> None:
    assert rule(Source(path, text)) == set()


def test_relative_imports_are_resolved() -> None:
    source = Source("rbln_vllm/worker/a.py", "from ..core import step\nfrom . import b")
    assert source.imports() == {
        "rbln_vllm.core",
        "rbln_vllm.core.step",
        "rbln_vllm.worker",
        "rbln_vllm.worker.b",
    }


def test_there_are_sources() -> None:
    paths = {source.path for source in sources()}
    assert {"rbln_vllm/__init__.py", "rbln_host/__init__.py"} <= paths
