# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rbln_vllm import envs


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in envs.REGISTRY:
        monkeypatch.delenv(row.name, raising=False)


def test_defaults() -> None:
    assert envs.enable_warm_up() is True
    assert envs.compile_only() is False
    assert envs.num_hidden_layers() == 0
    assert envs.force_npu_name() is None
    assert envs.host_executor() == "native"
    assert envs.compile_cache_disabled() is False
    assert envs.kv_cache_space_bytes() is None
    assert envs.use_vllm_model() is None
    assert envs.published_model_impl() is None
    assert envs.visible_devices() == ""
    assert envs.deprecated_values() == {}
    assert envs.check_environment() == ()
    assert envs.fold_device_pool() == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("TRUE", True), ("1", True), (" True ", True)]
    + [(text, False) for text in ("0", "false", "yes", "on", "2", "")],
)
def test_booleans_follow_the_vendors_rule(
    monkeypatch: pytest.MonkeyPatch, text: str, value: bool
) -> None:
    monkeypatch.setenv("VLLM_RBLN_ENABLE_WARM_UP", text)
    monkeypatch.setenv("VLLM_RBLN_COMPILE_ONLY", text)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", text)
    monkeypatch.setenv("VLLM_RBLN_USE_VLLM_MODEL", text)
    assert envs.enable_warm_up() is value
    assert envs.compile_only() is value
    assert envs.compile_cache_disabled() is value
    assert envs.use_vllm_model() is value


def test_values_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RBLN_NUM_HIDDEN_LAYERS", "2")
    assert envs.num_hidden_layers() == 2
    monkeypatch.setenv("VLLM_RBLN_NUM_HIDDEN_LAYERS", "3")
    assert envs.num_hidden_layers() == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4 << 30), ("0.5", 1 << 29), ("1e-3", (1 << 30) // 1000), ("0", None), ("", None)],
)
def test_kv_cache_space_is_gib(
    monkeypatch: pytest.MonkeyPatch, text: str, size: int | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
    assert envs.kv_cache_space_bytes() == size


@pytest.mark.parametrize(
    ("name", "text", "reader", "message"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "4GB", envs.kv_cache_space_bytes, "number of GiB"),
        ("VLLM_CPU_KVCACHE_SPACE", "-1", envs.kv_cache_space_bytes, "GiB >= 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "nan", envs.kv_cache_space_bytes, "GiB >= 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "inf", envs.kv_cache_space_bytes, "GiB >= 0"),
        ("VLLM_RBLN_NUM_HIDDEN_LAYERS", "two", envs.num_hidden_layers, "whole number"),
        ("VLLM_RBLN_NUM_HIDDEN_LAYERS", "-1", envs.num_hidden_layers, "whole number >= 0"),
        ("RBLN_HOST_EXECUTOR", "gpu", envs.host_executor, "native or reference"),
        ("RBLN_HOST_ISA", "sse", envs.host_isa, "portable, avx2, avx512, avx512_bf16"),
        ("RBLN_HOST_SPIN_US", "-1", envs.host_spin_us, "whole number >= 0"),
        ("VLLM_RBLN_SUB_BLOCK_SIZE", "x", envs.deprecated_values, "whole number"),
        (
            "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS",
            "1;2",
            envs.deprecated_values,
            "separated by commas",
        ),
    ],
)
def test_errors_name_the_variable(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    reader: Callable[[], object],
    message: str,
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message) as caught:
        reader()
    assert f"{name}={text!r}" in str(caught.value)


def test_forced_npu_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_TARGET_SOC", "RBLN-CR13")
    assert envs.force_npu_name() == "RBLN-CR13"
    monkeypatch.setenv("RBLN_FORCE_NPU_NAME", "RBLN-CR03")
    assert envs.force_npu_name() == "RBLN-CR03"
    monkeypatch.setenv("RBLN_FORCE_NPU_NAME", "")
    assert envs.force_npu_name() == "RBLN-CR13"


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert envs.cache_root() == Path("/home/someone/.cache/vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert envs.cache_root() == Path("/xdg/vllm")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "~/mine")
    assert envs.cache_root() == Path("/home/someone/mine")


def test_children_see_what_a_parent_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_VLLM_RBLN_RESOLVED_MODEL_IMPL", "")
    envs.publish_model_impl("vllm")
    # The publisher itself may go on to serve another model.
    assert envs.published_model_impl() is None
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert envs.published_model_impl() == "vllm"


@pytest.mark.parametrize("text", ["vllm", "transformers", "vllm@", "vllm@x", "optimum@1", "@1"])
def test_what_a_user_typed_is_not_a_published_answer(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("_VLLM_RBLN_RESOLVED_MODEL_IMPL", text)
    assert envs.published_model_impl() is None


def test_only_resolved_names_are_published() -> None:
    with pytest.raises(ValueError, match="'optimum' is not a resolved"):
        envs.publish_model_impl("optimum")


def test_device_pool_is_folded_into_the_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "unset below, so that teardown restores it")
    monkeypatch.delenv("RBLN_VISIBLE_DEVICES")
    monkeypatch.setenv("RBLN_DEVICES", "0,1")
    (warning,) = envs.fold_device_pool()
    assert "RBLN_DEVICES is deprecated: use RBLN_VISIBLE_DEVICES" in warning
    assert envs.visible_devices() == "0,1"
    assert "RBLN_DEVICES" not in os.environ
    assert envs.fold_device_pool() == ()


def test_the_new_device_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "2")
    monkeypatch.setenv("RBLN_DEVICES", "0,1")
    (warning,) = envs.fold_device_pool()
    assert "'0,1' of RBLN_DEVICES is ignored" in warning
    assert envs.visible_devices() == "2"


def test_openmp_threads_park_unless_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    envs.park_idle_openmp_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    envs.park_idle_openmp_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_deprecated_values_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RBLN_TP_SIZE", "4")
    monkeypatch.setenv("VLLM_RBLN_SAMPLER", "0")
    monkeypatch.setenv("VLLM_RBLN_SUB_BLOCK_SIZE", "")
    monkeypatch.setenv("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY", "exp")
    monkeypatch.setenv("VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS", "1, 2,8")
    assert envs.deprecated_values() == {
        "num_devices_per_local_rank": ("VLLM_RBLN_TP_SIZE", 4),
        "use_custom_sampler": ("VLLM_RBLN_SAMPLER", False),
        "decode_batch_bucket_strategy": ("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY", "exponential"),
        "decode_batch_bucket_manual_buckets": (
            "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS",
            (1, 2, 8),
        ),
    }
    monkeypatch.setenv("VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK", "2")
    name, value = envs.deprecated_values()["num_devices_per_local_rank"]
    assert (name, value) == ("VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK", 2)


def test_variables_without_effect_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RBLN_METRICS", "1")
    monkeypatch.setenv("VLLM_RBLN_USE_DEVICE_TENSOR", "0")
    assert envs.check_environment() == (
        "VLLM_RBLN_METRICS is set: not built yet: the performance report at shutdown",
        "VLLM_RBLN_USE_DEVICE_TENSOR is set: no effect on HOST: host memory is device memory",
    )


def test_registry_rows_are_unique_and_documented() -> None:
    names = [row.name for row in envs.REGISTRY]
    assert len(names) == len(set(names))
    assert all(row.doc for row in envs.REGISTRY)
    assert all(row.no_effect for row in envs.INERT)


def test_a_row_checks_its_own_name() -> None:
    with pytest.raises(ValueError, match="not an environment variable name"):
        envs.Variable("lower", str, "", "")
    with pytest.raises(ValueError, match="not both"):
        envs.Variable("X", str, "", "", no_effect="why", field="f")


def test_upstream_knows_our_names(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = envs.upstream_readers()
    assert set(readers) >= {"VLLM_RBLN_ENABLE_WARM_UP", "VLLM_RBLN_METRICS", "VLLM_RBLN_SAMPLER"}
    monkeypatch.setenv("VLLM_RBLN_ENABLE_WARM_UP", "0")
    assert readers["VLLM_RBLN_ENABLE_WARM_UP"]() is False


def test_only_the_registry_reads_the_environment() -> None:
    registry = Path(envs.__file__).parent
    readers = {
        path.parent
        for path in registry.parent.rglob("*.py")
        if any(word in path.read_text() for word in ("os.environ", "os.getenv"))
    }
    assert readers == {registry}
