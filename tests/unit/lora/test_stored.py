# SPDX-License-Identifier: Apache-2.0
"""Adapters in a compiled directory: what is written is read back, and nothing else."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from rbln_vllm.lora.config import RBLNLoRAConfig
from rbln_vllm.lora.fit import AdapterError
from rbln_vllm.lora.slots import LowRank
from rbln_vllm.lora.stored import StoredAdapters, compiled_shape, write_adapters
from rbln_vllm.optimum.directory import CompiledDirectory, new_manifest
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.request import check_same
from rbln_vllm.toolchain import AdaptedModule, FileEntry, host_toolchain
from tests.unit.host.programs import scale_program
from tests.unit.optimum.test_directory import CONFIG, LAYERS

MODULES = (
    AdaptedModule("layers.0.q_proj", "layers.0.q_proj.weight", 8, 20),
    AdaptedModule("layers.0.o_proj", "layers.0.o_proj.weight", 20, 8),
)
NAMES = {"sql": 1, "chat": 2}
LORA = RBLNLoRAConfig.of(
    {
        "adapters": [
            {"lora_int_id": number, "lora_name": name, "lora_path": f"/adapters/{name}", "r": 2}
            for name, number in NAMES.items()
        ],
        "max_lora_rank": 4,
    }
)
RECORDED = replace(CONFIG, lora_config=LORA)
ADAPTERS = compiled_shape(LORA, torch.float32).adapters(MODULES)


def parts_of(number: int, rank: int = 2) -> dict[str, LowRank]:
    numbers = torch.Generator().manual_seed(number)
    return {
        m.name: LowRank(
            torch.randn(rank, m.in_features, generator=numbers),
            torch.randn(m.out_features, rank, generator=numbers),
        )
        for m in MODULES
    }


def write(directory: Path, parts: dict[int, dict[str, LowRank]]) -> Path:
    toolchain = host_toolchain()
    files = write_adapters(directory, parts)
    manifest = new_manifest(
        toolchain,
        RECORDED,
        "LlamaForCausalLM",
        LAYERS,
        adapters=ADAPTERS,
        attachments=files,
    )
    toolchain.write(directory, manifest, [scale_program("decode_b1_q1", {"w": torch.ones(4)})])
    return directory


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    return write(tmp_path / "model", {number: parts_of(number) for number in NAMES.values()})


def read(directory: Path) -> StoredAdapters:
    found = CompiledDirectory.read(directory, host_toolchain())
    assert found.adapters is not None
    return found.adapters


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = directory / "rbln_config.json"
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


def forge(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Another file for the first adapter, which the manifest vouches for."""
    data = save(tensors)
    file = directory / "adapters" / "forged.safetensors"
    file.write_bytes(data)
    digest = host_toolchain().cache(directory / "cache", None).digest(file)  # type: ignore[arg-type]
    entry = {"path": "adapters/forged.safetensors", "size": len(data), "blake3": digest}
    change(directory, lambda d: d["attachments"].update({"adapter 1": entry}))


def test_reads_what_was_written(compiled: Path) -> None:
    stored = read(compiled)
    assert stored.ids == NAMES
    assert stored.adapters == ADAPTERS
    assert stored.config == LORA
    for name, number in NAMES.items():
        found, expected = stored.parts(name), parts_of(number)
        assert found.keys() == expected.keys()
        for module, part in expected.items():
            assert torch.equal(found[module].a_RK, part.a_RK)
            assert torch.equal(found[module].b_OR, part.b_OR)
            assert found[module].scale == 1.0
    with pytest.raises(KeyError):
        stored.parts("other")
    CompiledDirectory.read(compiled, host_toolchain()).verify()


def test_the_command_names_the_adapters(compiled: Path) -> None:
    command = CompiledDirectory.read(compiled, host_toolchain()).compile_command
    assert command.endswith(
        "--lora-modules sql=/adapters/sql chat=/adapters/chat --max-lora-rank 4"
    )


def test_a_model_without_adapters_has_none(compiled: Path) -> None:
    change(compiled, lambda d: d["model"]["rbln_config"].update(lora_config=None))
    assert CompiledDirectory.read(compiled, host_toolchain()).adapters is None


def test_equal_content_is_one_file(tmp_path: Path) -> None:
    directory = write(tmp_path, dict.fromkeys(NAMES.values(), parts_of(1)))
    assert len(list((directory / "adapters").iterdir())) == 1
    assert read(directory).parts("sql").keys() == read(directory).parts("chat").keys()


def test_a_damaged_file_is_refused(compiled: Path) -> None:
    for damage in (
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"!"),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.unlink(),
    ):
        copy = shutil.copytree(compiled, compiled.with_name("copy"))
        damage(next((copy / "adapters").iterdir()))
        with pytest.raises(ValueError, match=r"is (truncated|missing).*--lora-modules sql="):
            CompiledDirectory.read(copy, host_toolchain()).verify()
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "has no LoRA weights"),
        ({"layers.0.q_proj.lora_A": torch.zeros(2, 8)}, "lora_A or lora_B is missing"),
        ({"layers.0.q_proj": torch.zeros(2, 8)}, "its file has a tensor"),
        ({"lora_A": torch.zeros(2, 8), "lora_B": torch.zeros(2, 8)}, "its file has a tensor"),
        (
            {"x.lora_A": torch.zeros(2, 8), "x.lora_B": torch.zeros(20, 2)},
            "changes x, which this model has not",
        ),
        (
            {
                "layers.0.q_proj.lora_A": torch.zeros(2, 8),
                "layers.0.q_proj.lora_B": torch.zeros(8, 2),
            },
            "for another model",
        ),
        (
            {
                "layers.0.q_proj.lora_A": torch.zeros(5, 8),
                "layers.0.q_proj.lora_B": torch.zeros(20, 5),
            },
            "rank 5 is above 4",
        ),
        (
            {
                "layers.0.q_proj.lora_A": torch.zeros(2, 8, dtype=torch.int64),
                "layers.0.q_proj.lora_B": torch.zeros(20, 2, dtype=torch.int64),
            },
            "holds torch.int64, not torch.float32",
        ),
    ],
    ids=range(8),
)
def test_hostile_files_are_refused(
    compiled: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    forge(compiled, tensors)
    CompiledDirectory.read(compiled, host_toolchain()).artifact.verify()
    with pytest.raises(AdapterError, match=words):
        read(compiled).parts("sql")


def test_a_file_that_is_none(compiled: Path) -> None:
    entry = {"path": "rbln_config.json", "size": 1, "blake3": "0"}
    change(compiled, lambda d: d["attachments"].update({"adapter 1": entry}))
    with pytest.raises(AdapterError, match="cannot be read"):
        read(compiled).parts("sql")


def test_a_file_elsewhere_is_not_read(compiled: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.safetensors"
    save_file({"a": torch.zeros(1)}, outside)
    (compiled / "adapters" / "link.safetensors").symlink_to(outside)
    entry = {"path": "adapters/link.safetensors", "size": 1, "blake3": "0"}
    change(compiled, lambda d: d["attachments"].update({"adapter 1": entry}))
    with pytest.raises(AdapterError, match="leads out of the artifact"):
        read(compiled).parts("sql")


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["attachments"].pop("adapter 2"),
        lambda d: d["attachments"].update({"adapter 2": {"path": "../x", "size": 1}}),
        lambda d: d["attachments"].update(
            {"adapter 2": {"path": "../x", "size": 1, "blake3": "0"}}
        ),
        lambda d: d.update(attachments=[]),
        lambda d: d["model"].pop("linears"),
        lambda d: d["model"].update(linears=[]),
        lambda d: d["model"]["linears"][0].update(in_features="8"),
        lambda d: d["model"]["rbln_config"]["lora_config"].pop("max_lora_rank"),
        lambda d: d["model"]["rbln_config"]["lora_config"].update(adapters=[]),
        lambda d: d["model"]["rbln_config"]["lora_config"]["adapters"][0].update(bias="all"),
        lambda d: d["model"]["rbln_config"].update(lora_config=3),
        lambda d: d["model"]["rbln_config"].update(dtype="nn"),
    ],
)
def test_hostile_manifests_are_refused(
    compiled: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    change(compiled, edit)
    with pytest.raises(ValueError, match="compile it anew with rbln-vllm compile"):
        CompiledDirectory.read(compiled, host_toolchain())


def test_names_are_digests(compiled: Path) -> None:
    document = json.loads((compiled / "rbln_config.json").read_text())
    for item in document["attachments"].values():
        entry = FileEntry(**item)
        assert entry.path == f"adapters/{entry.blake3}.safetensors"
        assert load_file(compiled / entry.path)


def test_a_directory_is_loaded_for_its_own_adapters() -> None:
    given = LORA.to_json()
    given["adapters"] = [{**adapter, "lora_path": "gone"} for adapter in given["adapters"]]
    check_same(RECORDED, RBLNModelConfig.of({"lora_config": given}), {})
    check_same(RECORDED, RBLNModelConfig.of({"batch_size": 4}), {})
    others = {**given, "adapters": given["adapters"][:1]}
    for recorded, config in ((RECORDED, others), (CONFIG, given)):
        options = RBLNModelConfig.of({"lora_config": config})
        with pytest.raises(ValueError, match="lora_config is not that of the compiled model"):
            check_same(recorded, options, {})
