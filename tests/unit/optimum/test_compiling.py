# SPDX-License-Identifier: Apache-2.0
"""Compiling: whole or not at all, and the same from several processes as from one."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_vllm.optimum.compiling import CompileJob, _whole, check_target
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.parallel import compile_programs
from rbln_vllm.optimum.sources import link_or_copy, local_directory, served_files
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import AdaptedModule, Adapters, Captured, CaptureError, host_toolchain
from tests.unit.host.programs import scale_program

KEYS = tuple(ProgramKey(Role.DECODE, batch) for batch in (1, 2, 4, 8, 16))
ADAPTERS = Adapters(2, 4, torch.float32, (AdaptedModule("x", "w", 4, 4),))


class Builder:
    """Compiles programs that multiply by a weight and by a constant of their own."""

    def __init__(self, fails_at: str = "", dies_at: str = "") -> None:
        self.weight = torch.arange(4.0)
        self.fails_at, self.dies_at = fails_at, dies_at

    def named_weights(self) -> dict[str, Tensor]:
        return {"w": self.weight}

    def compile(self, keys: Sequence[ProgramKey], _: Any) -> Iterator[Captured]:
        for key in keys:
            if key.name == self.fails_at:
                raise CaptureError(f"{key.name}: no")
            if key.name == self.dies_at:
                os._exit(3)
            constant = torch.full((4,), float(key.batch), dtype=torch.bfloat16)
            weights = {"w": self.weight, f"constant.{key.batch}": constant}
            item = scale_program(key.name, {**weights, "constant.none": torch.empty(0)})
            yield replace(item, adapters=ADAPTERS)


def compiled(builder: Builder, workers: int) -> dict[str, Captured]:
    found = list(compile_programs(builder, KEYS, host_toolchain(), workers))  # type: ignore[arg-type]
    assert len({item.graph.name for item in found}) == len(found)
    return {item.graph.name: item for item in found}


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_processes_compile_what_one_does(workers: int) -> None:
    builder = Builder()
    expected, found = compiled(builder, 1), compiled(builder, workers)
    assert found.keys() == expected.keys()
    for name, item in found.items():
        assert item.graph == expected[name].graph
        assert item.adapters == ADAPTERS
        assert item.weights["w"] is not None
        assert item.weights["w"].data_ptr() == builder.weight.data_ptr()
        for weight, tensor in expected[name].weights.items():
            torch.testing.assert_close(item.weights[weight], tensor, rtol=0, atol=0)


def test_what_cannot_be_compiled_ends_it() -> None:
    with pytest.raises(CaptureError, match="decode_b4_q1: no"):
        compiled(Builder(fails_at="decode_b4_q1"), 2)


def test_a_process_that_dies_ends_it() -> None:
    with pytest.raises(RuntimeError, match="a worker process died"):
        compiled(Builder(dies_at="decode_b8_q1"), 2)


def test_one_process_at_least() -> None:
    with pytest.raises(ValueError, match="by one process at least, not by 0"):
        compiled(Builder(), 0)


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_appears_whole(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "deep" / "model"
    if exists:
        target.mkdir(parents=True)
        (target / "old").touch()
    with _whole(target) as scratch:
        (scratch / "new").touch()
        assert target.exists() is exists
    assert [file.name for file in target.iterdir()] == ["new"]
    assert list(target.parent.iterdir()) == [target]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(KeyboardInterrupt):
        fail_in(target)
    assert [file.name for file in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def fail_in(target: Path) -> None:
    with _whole(target) as scratch:
        (scratch / "new").touch()
        raise KeyboardInterrupt


def test_only_compiled_models_are_replaced(tmp_path: Path) -> None:
    check_target(tmp_path / "new", tmp_path)
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", tmp_path)
    (tmp_path / "empty" / "rbln_config.json").touch()
    check_target(tmp_path / "empty", tmp_path)
    with pytest.raises(FileExistsError, match="holds no compiled model"):
        check_target(tmp_path, tmp_path / "m")
    with pytest.raises(FileExistsError, match="holds no compiled model"):
        check_target(tmp_path / "empty" / "rbln_config.json", tmp_path)
    with pytest.raises(FileExistsError, match="is the model itself"):
        check_target(tmp_path / "empty" / "..", tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere"])
def test_a_path_that_is_not_there_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no directory {name}"):
        local_directory(name, {})


def test_a_dtype_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype 'int8' is not auto, float32, float16, bfloat16"):
        CompileJob.of(str(tmp_path), RBLNModelConfig(), dtype="int8")


def test_what_is_copied_is_what_a_server_reads(tmp_path: Path) -> None:
    wanted = ("LICENSE", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
    for name in (*wanted, "config.json", "model.safetensors", "README.md", "modeling_x.py"):
        (tmp_path / name).touch()
    assert tuple(file.name for file in served_files(tmp_path)) == wanted


def test_a_link_is_a_copy_that_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    link_or_copy(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").samefile(tmp_path / "a")


def test_what_cannot_take_its_place_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError), _whole(target) as scratch:
        scratch.rmdir()
    assert [file.name for file in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]
