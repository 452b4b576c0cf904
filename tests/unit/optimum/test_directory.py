# SPDX-License-Identifier: Apache-2.0
"""A compiled directory: what is read from it, and what is said of one that cannot be served."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.optimum.directory import CompiledDirectory, new_manifest
from rbln_vllm.optimum.recorded import RecordedConfig
from rbln_vllm.toolchain import host_toolchain
from tests.unit.host.programs import scale_program

CONFIG = RecordedConfig(
    cls_name="RBLNLlamaForCausalLM",
    source="org/model",
    dtype="float32",
    npu="HOST",
    attn_impl="flash_attn",
    batch_size=4,
    max_seq_len=256,
    prefill_chunk_size=64,
    kvcache_block_size=32,
    decoder_batch_sizes=(4, 1),
)
LAYERS = (KVLayer("layers.0", 4, 2, 32, "float32", 0),)
COMMAND = (
    "rbln-vllm compile org/model --output {} --dtype float32 --batch-size 4 --max-seq-len 256 "
    "--prefill-chunk-size 64 --kvcache-block-size 32 --decoder-batch-sizes 4,1"
)


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    toolchain = host_toolchain()
    manifest = new_manifest(toolchain, CONFIG, "LlamaForCausalLM", LAYERS)
    toolchain.write(tmp_path, manifest, [scale_program("decode_b1_q1", {"w": torch.ones(4)})])
    return tmp_path


def read(directory: Path) -> CompiledDirectory:
    return CompiledDirectory.read(directory, host_toolchain())


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = directory / "rbln_config.json"
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


def test_reads_what_was_written(compiled: Path) -> None:
    found = read(compiled)
    assert (found.config, found.kv_layers, found.path) == (CONFIG, LAYERS, compiled)
    assert found.artifact.manifest.label == "model"
    assert found.compile_command == COMMAND.format(compiled)
    found.verify()
    found.check_programs(["decode_b1_q1"])
    found.check_device("HOST")


def test_a_naive_model_has_no_partition() -> None:
    assert CONFIG.kvcache_partition_len == 32
    naive = {**CONFIG.to_json(), "attn_impl": "eager", "kvcache_block_size": 256}
    assert RecordedConfig.from_json(naive).kvcache_partition_len is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"dtype": 3},
        {"decoder_batch_sizes": [0]},
        {"num_speculative_tokens": -1},
        {"use_inputs_embeds": 1},
        {"cls_name": "RBLNBert"},
    ],
)
def test_a_record_is_checked(wrong: dict[str, Any]) -> None:
    words = r"are (texts|positive numbers)|is a number|is true or false|there is no class RBLNBert"
    with pytest.raises(ValueError, match=words):
        RecordedConfig.from_json({**CONFIG.to_json(), **wrong})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(format=1), "manifest format 1 is not 2"),
        (lambda d: d.clear(), "manifest format None is not"),
        (lambda d: d["model"].pop("rbln_config"), "does not say what the model was compiled for"),
        (lambda d: d["model"].pop("kv_layers"), "does not say what the model was compiled for"),
        (lambda d: d["model"]["rbln_config"].update(old=1), "does not say what the model was"),
    ],
)
def test_another_format_names_the_command(
    compiled: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    change(compiled, edit)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read(compiled)
    assert f"rbln-vllm compile MODEL --output {compiled}" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "made_by"),
    [
        (lambda d: d.update(toolchain_version="0.0.1"), "rbln_host 0.0.1"),
        (lambda d: d.update(toolchain="rebel"), "rebel"),
        (lambda d: d["key"].update(rbln_vllm="0.0.1"), "rbln-vllm 0.0.1"),
        (lambda d: d["key"].pop("rbln_vllm"), "rbln-vllm None"),
    ],
)
def test_another_version_names_the_command(
    compiled: Path, edit: Callable[[dict[str, Any]], object], made_by: str
) -> None:
    change(compiled, edit)
    with pytest.raises(ValueError, match=f"was compiled by {made_by}") as caught:
        read(compiled)
    assert COMMAND.format(compiled) in str(caught.value)


def test_other_code_of_the_same_version_is_a_warning(
    compiled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(compiled).warn_of_other_code(logging.getLogger("vllm.test"))
    assert not caplog.messages
    change(compiled, lambda d: d["key"].update(compiler_code="0" * 12))
    with caplog.at_level(logging.WARNING):
        read(compiled).warn_of_other_code(logging.getLogger("aot.test"))
    assert COMMAND.format(compiled) in caplog.text


def test_missing_programs_are_named(compiled: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks 1 programs.*: decode_b2_q1. Leave out") as caught:
        read(compiled).check_programs(["decode_b1_q1", "decode_b2_q1"])
    assert COMMAND.format(compiled) in str(caught.value)


def test_a_damaged_file_names_the_command(compiled: Path) -> None:
    (compiled / "programs" / "decode_b1_q1.json").write_text("{}")
    found = read(compiled)
    with pytest.raises(ValueError, match="is truncated or altered: compile it anew with rbln"):
        found.verify()


def test_the_device_must_be_the_same(compiled: Path) -> None:
    with pytest.raises(ValueError, match="compiled for HOST, not for RBLN-CR03: unset RBLN_FORCE"):
        read(compiled).check_device("RBLN-CR03")
    change(compiled, lambda d: d["model"]["rbln_config"].update(npu="RBLN-CR03"))
    with pytest.raises(ValueError, match="not for HOST: set RBLN_FORCE_NPU_NAME=RBLN-CR03"):
        read(compiled).check_device("HOST")


def test_a_directory_of_the_vendors_compiler(tmp_path: Path) -> None:
    """Its `rbln_config.json` says other things, and its programs are `*.rbln`."""
    theirs = {"cls_name": "RBLNLlamaForCausalLM", "batch_size": 4, "_meta": {"cls": "old"}}
    (tmp_path / "rbln_config.json").write_text(json.dumps(theirs))
    (tmp_path / "prefill.rbln").touch()
    with pytest.raises(ValueError, match="holds no model that this version compiled") as caught:
        read(tmp_path)
    assert f"compile it anew with rbln-vllm compile MODEL --output {tmp_path}" in str(caught.value)


def test_what_is_recorded_does_not_change(compiled: Path) -> None:
    with pytest.raises(FrozenInstanceError):
        read(compiled).config.batch_size = 8  # type: ignore[misc]


def test_an_empty_directory_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model that this version compiled"):
        read(tmp_path)
