# SPDX-License-Identifier: Apache-2.0
import logging
import pickle
from collections.abc import Callable

import pytest

from rbln_vllm import envs
from rbln_vllm.config import ModelImpl, OptimumRBLNConfig, RBLNConfig, resolve, resolve_config
from rbln_vllm.config.legacy import rename_legacy_keys
from rbln_vllm.config.resolve import _warn_once
from rbln_vllm.devices import HOST, resolve_profile

LIMIT = "VLLM_RBLN_DECODE_BATCH_BUCKET_LIMIT"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in envs.REGISTRY:
        monkeypatch.delenv(row.name, raising=False)


@pytest.mark.parametrize("additional_config", [None, {}, RBLNConfig()])
def test_nothing_given_is_all_defaults(additional_config: object) -> None:
    resolution = resolve(additional_config, "vllm", HOST)
    assert resolution.config == RBLNConfig().as_resolved()
    assert resolution.config.model_fields_set == set()
    assert resolution.warnings == ()
    assert resolution.summary() == "RBLN config: all defaults"


@pytest.mark.parametrize(
    "additional_config",
    [{"max_prefill_run": 4}, RBLNConfig(max_prefill_run=4)],
)
def test_dict_and_object_are_the_same(additional_config: object) -> None:
    resolution = resolve(additional_config, "vllm", HOST)
    assert resolution.config == RBLNConfig(max_prefill_run=4).as_resolved()
    assert resolution.config.model_fields_set == {"max_prefill_run"}
    assert resolution.summary() == "RBLN config: {'max_prefill_run': 4}"


def test_the_implementation_chooses_the_class() -> None:
    assert type(resolve({}, "transformers", HOST).config) is OptimumRBLNConfig


@pytest.mark.parametrize("wrong", ["fp32", 3, ["strict_programs"], OptimumRBLNConfig()])
def test_other_types_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be a RBLNConfig or a mapping"):
        resolve(wrong, "vllm", HOST)


def test_unknown_fields_are_listed_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        resolve({"gdn_prefill_backend": "triton", "strict_programs": True}, "vllm", HOST)
    text = str(caught.value)
    assert "unknown field(s) gdn_prefill_backend:" in text
    assert "use_custom_sampler" in text
    assert "RBLNConfig knows" in text


@pytest.mark.parametrize(
    ("field", "impl", "owner"),
    [("optimum_overrides", "vllm", "transformers"), ("enforce_model_fp32", "transformers", "vllm")],
)
def test_fields_of_the_other_implementation_are_refused(
    field: str, impl: ModelImpl, owner: ModelImpl
) -> None:
    with pytest.raises(ValueError, match=f"{field} belong to the {owner} implementation"):
        resolve({field: {}}, impl, HOST)


def test_the_device_must_run_the_implementation() -> None:
    with pytest.raises(ValueError, match="vllm implementation does not run on RBLN-CA25"):
        resolve({}, "vllm", resolve_profile("RBLN-CA25"))


def test_deprecated_variable_is_between_config_and_default() -> None:
    deprecated = {"decode_batch_bucket_limit": (LIMIT, 4)}
    alone = resolve({}, "vllm", HOST, deprecated)
    assert alone.config == RBLNConfig(decode_batch_bucket_limit=4).as_resolved()
    assert alone.config.model_fields_set == {"decode_batch_bucket_limit"}
    assert alone.warnings == (
        "Deprecated environment variables, removed in 0.14.0: "
        f"{LIMIT} -> --rbln-decode-batch-bucket-limit",
    )
    both = resolve({"decode_batch_bucket_limit": 2}, "vllm", HOST, deprecated)
    assert both.config == RBLNConfig(decode_batch_bucket_limit=2).as_resolved()
    assert "the config wins" in both.warnings[1]
    assert LIMIT in both.warnings[1]


def test_object_fields_not_given_take_the_deprecated_variable() -> None:
    deprecated = {"decode_batch_bucket_limit": (LIMIT, 4)}
    config = resolve(RBLNConfig(max_prefill_run=1), "vllm", HOST, deprecated).config
    expected = RBLNConfig(max_prefill_run=1, decode_batch_bucket_limit=4)
    assert config == expected.as_resolved()


def test_variables_of_the_other_implementation_are_reported_as_ignored() -> None:
    resolution = resolve({}, "transformers", HOST, {"decode_batch_bucket_limit": (LIMIT, 4)})
    assert resolution.config == OptimumRBLNConfig().as_resolved()
    assert "(ignored by the transformers implementation)" in resolution.warnings[0]


def test_deprecated_variables_cannot_ask_for_what_is_not_built() -> None:
    with pytest.raises(ValueError, match="use_w8a8=True is not available"):
        resolve({}, "vllm", HOST, {"use_w8a8": ("VLLM_RBLN_USE_W8A8", True)})


def test_resolving_again_changes_nothing() -> None:
    deprecated = {"decode_batch_bucket_limit": (LIMIT, 4)}
    first = resolve({"decode_batch_bucket_limit": 2}, "vllm", HOST, deprecated)
    child = pickle.loads(pickle.dumps(first.config))
    again = resolve(child, "vllm", HOST, deprecated)
    assert again.config is child
    assert again.config == first.config
    assert again.warnings == ()


def test_legacy_keys_of_the_transformers_implementation() -> None:
    values, warnings = rename_legacy_keys(
        {"rbln_config": {"a": 1}, "prefix_block_size": 64}, "transformers"
    )
    assert values == {"optimum_overrides": {"a": 1}, "sub_block_size": 64}
    assert len(warnings) == 2
    assert (
        "'rbln_config' is deprecated and removed in 0.14.0: use 'optimum_overrides'" in warnings[0]
    )
    resolution = resolve({"rbln_config": {"a": 1}}, "transformers", HOST)
    assert resolution.config == OptimumRBLNConfig(optimum_overrides={"a": 1}).as_resolved()
    assert len(resolution.warnings) == 1


def test_legacy_and_new_key_together_are_refused() -> None:
    with pytest.raises(ValueError, match="both 'rbln_config' and its new name"):
        resolve({"rbln_config": {}, "optimum_overrides": {}}, "transformers", HOST)


def test_legacy_keys_are_unknown_to_the_vllm_implementation() -> None:
    with pytest.raises(ValueError, match="unknown field"):
        resolve({"rbln_config": {}}, "vllm", HOST)


def test_manual_buckets_without_the_strategy_are_doubted() -> None:
    resolution = resolve({"decode_batch_bucket_manual_buckets": [1, 8]}, "vllm", HOST)
    assert "add --rbln-decode-batch-bucket-strategy manual" in resolution.warnings[0]
    given = {
        "decode_batch_bucket_strategy": "manual",
        "decode_batch_bucket_manual_buckets": [1, 8],
    }
    assert resolve(given, "vllm", HOST).warnings == ()


@pytest.fixture
def messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """What the module logs, also after vLLM has stopped its loggers from propagating."""
    logger = logging.getLogger("vllm.rbln.config")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger=logger.name)
    _warn_once.cache_clear()
    return lambda: [record.message for record in caplog.records]


def test_resolve_config_reads_the_environment_and_logs(
    monkeypatch: pytest.MonkeyPatch, messages: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv(LIMIT, "3")
    first = resolve_config({}, "vllm", HOST)
    assert first == RBLNConfig(decode_batch_bucket_limit=3).as_resolved()
    assert messages()[0].startswith("Deprecated environment variables")
    assert messages()[1:] == ["RBLN config: {'decode_batch_bucket_limit': 3}"]


def test_warnings_are_logged_once_and_a_resolved_config_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, messages: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv(LIMIT, "3")
    first = resolve_config({}, "vllm", HOST)
    resolve_config({}, "vllm", HOST)
    logged = messages()
    assert [text.startswith("Deprecated") for text in logged] == [True, False, False]
    assert resolve_config(first, "vllm", HOST) is first
    assert messages() == logged
