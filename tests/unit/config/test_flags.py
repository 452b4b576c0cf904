# SPDX-License-Identifier: Apache-2.0
import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from rbln_vllm.config import RBLNConfig, resolve
from rbln_vllm.config.flags import GROUP_TITLE, add_flags, flagged_fields, merge
from rbln_vllm.config.options import flag_of
from rbln_vllm.devices import HOST, REBEL100

Parse = Callable[..., object]
"""From command line arguments to what vLLM takes as additional_config."""

SERVE_YAML = """
rbln-max-prefill-run: 5
rbln-strict-programs: true
rbln-use-custom-sampler: false
rbln-decode-batch-bucket-strategy: manual
rbln-decode-batch-bucket-manual-buckets: [1, 4, 16]
additional-config: {require_precompiled: true}
"""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """vLLM's own parser with vLLM's own arguments, as `vllm serve` builds it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(
        FlexibleArgumentParser(prog="vllm serve")
    )
    parser.add_argument("--config")
    add_flags(parser, HOST)
    return parser


@pytest.fixture
def parse(parser: argparse.ArgumentParser) -> Parse:
    return lambda *argv: parser.parse_args(list(argv)).additional_config


def test_a_flag_not_given_writes_nothing(parse: Parse) -> None:
    assert parse() == {}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--rbln-max-prefill-run", "3"], {"max_prefill_run": 3}),
        (["--rbln-max-prefill-run=0"], {"max_prefill_run": 0}),
        (["--rbln_max_prefill_run", "3"], {"max_prefill_run": 3}),
        (["--rbln-max-prefill-run", "none"], {"max_prefill_run": None}),
        (["--rbln-max-prefill-run", "1", "--rbln-max-prefill-run", "2"], {"max_prefill_run": 2}),
        (["--rbln-strict-programs"], {"strict_programs": True}),
        (["--no-rbln-use-custom-sampler"], {"use_custom_sampler": False}),
        (["--no-rbln-use-dynamic-kv-cache"], {"use_dynamic_kv_cache": False}),
        (
            ["--rbln-decode-batch-bucket-strategy", "linear"],
            {"decode_batch_bucket_strategy": "linear"},
        ),
        (["--rbln-compile-dtype", ""], {"compile_dtype": ""}),
        (
            ["--rbln-decode-batch-bucket-manual-buckets", "1,3,8"],
            {"decode_batch_bucket_manual_buckets": [1, 3, 8]},
        ),
        (
            ["--rbln-decode-batch-bucket-manual-buckets", "1", "3,8"],
            {"decode_batch_bucket_manual_buckets": [1, 3, 8]},
        ),
        (["--rbln-optimum-overrides", '{"a": {"b": 1}}'], {"optimum_overrides": {"a": {"b": 1}}}),
    ],
)
def test_flags_write_the_flat_dict(
    parse: Parse, argv: list[str], expected: dict[str, object]
) -> None:
    assert parse(*argv) == expected


def test_the_dict_is_laid_over_the_flags(parse: Parse) -> None:
    assert parse(
        "--rbln-max-prefill-run",
        "3",
        "--rbln-strict-programs",
        "--additional-config",
        '{"max_prefill_run": 4}',
        "--additional-config.require_precompiled",
        "true",
    ) == {"max_prefill_run": 4, "strict_programs": True, "require_precompiled": True}


def test_what_stands_later_wins(parse: Parse) -> None:
    config = parse("--additional-config", '{"max_prefill_run": 4}', "--rbln-max-prefill-run", "3")
    assert config == {"max_prefill_run": 3}


def test_nested_dicts_are_merged(parse: Parse) -> None:
    assert parse(
        "--rbln-optimum-overrides",
        '{"a": {"b": 1}}',
        "--additional-config.optimum_overrides.a.c",
        "2",
    ) == {"optimum_overrides": {"a": {"b": 1, "c": 2}}}


def test_a_bare_string_is_passed_on_and_refused_later(parse: Parse) -> None:
    assert parse("--additional-config", "fp32") == "fp32"
    with pytest.raises(ValueError, match="must be a RBLNConfig or a mapping"):
        resolve("fp32", "vllm", HOST)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--additional-config", "fp32", "--rbln-strict-programs"], "not a JSON object"),
        (["--rbln-max-prefill-run", "many"], "not a whole number or none"),
        (["--rbln-decode-batch-bucket-min", "x"], "invalid int value"),
        (["--rbln-decode-batch-bucket-manual-buckets", "1;2"], "not a list like 1,2,4"),
        (["--rbln-decode-batch-bucket-strategy", "exp"], "invalid choice"),
        (["--rbln-optimum-overrides", "[1]"], "is not a JSON object"),
        (["--rbln-optimum-overrides", "{"], "not JSON"),
    ],
)
def test_wrong_values_are_refused_while_parsing(
    parse: Parse, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert message in capsys.readouterr().err


def test_parsing_leaves_no_trace(parse: Parse) -> None:
    parse("--rbln-strict-programs", "--additional-config", '{"max_prefill_run": 4}')
    assert parse() == {}


def test_a_yaml_file_sets_flags_and_the_command_line_wins(parse: Parse, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(SERVE_YAML)
    assert parse("--config", str(path), "--rbln-max-prefill-run", "6") == {
        "max_prefill_run": 6,
        "strict_programs": True,
        "use_custom_sampler": False,
        "decode_batch_bucket_strategy": "manual",
        "decode_batch_bucket_manual_buckets": [1, 4, 16],
        "require_precompiled": True,
    }


def test_flags_reach_the_engine_arguments_and_resolve(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    model = ["--model", str(tmp_path)]  # any directory: vLLM looks up a name when offline
    buckets = ["--rbln-decode-batch-bucket-manual-buckets", "1,16"]
    strategy = ["--rbln-decode-batch-bucket-strategy", "manual"]
    namespace = parser.parse_args([*model, *buckets, *strategy])
    args = EngineArgs.from_cli_args(namespace)
    config = resolve(args.additional_config, "vllm", HOST).config
    assert isinstance(config, RBLNConfig)
    assert config.decode_batch_bucket_manual_buckets == (1, 16)


def test_a_flag_of_the_other_implementation_is_refused(parse: Parse) -> None:
    config = parse("--rbln-optimum-overrides", "{}")
    with pytest.raises(ValueError, match="belong to the transformers implementation"):
        resolve(config, "vllm", HOST)


def test_every_flagged_field_has_its_flag_in_the_group(parser: argparse.ArgumentParser) -> None:
    (group,) = (group for group in parser._action_groups if group.title == GROUP_TITLE)
    shown = {action.option_strings[0] for action in group._group_actions}
    assert shown == {flag_of(name) for name, _ in flagged_fields()}
    assert "--rbln-user-max-num-batched-tokens" not in shown


def test_help_prints_the_group(
    parser: argparse.ArgumentParser,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help=rblnconfig"])
    out = capsys.readouterr().out
    assert out.startswith("RBLNConfig:")
    assert "--no-rbln-use-w8a8" in out
    assert "--tensor-parallel-size" not in out
    assert "(default: 'exponential')" in out


def test_vllms_own_arguments_are_adapted(parser: argparse.ArgumentParser) -> None:
    actions = parser._option_string_actions
    assert parser.parse_args(["--block-size", "8192"]).block_size == 8192
    assert actions["--gpu-memory-utilization"].default == HOST.default_gpu_memory_utilization


def test_adding_twice_changes_nothing(parser: argparse.ArgumentParser) -> None:
    before = list(parser._option_string_actions)
    add_flags(parser, REBEL100)
    assert list(parser._option_string_actions) == before


def test_a_parser_with_choices_is_widened() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["auto", "cpu"])
    parser.add_argument("--block-size", type=int, choices=[8, 16])
    add_flags(parser)
    namespace = parser.parse_args(["--device", "rbln", "--block-size", "8192"])
    assert (namespace.device, namespace.block_size) == ("rbln", 8192)
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "tpu"])


def test_a_parser_without_additional_config_still_collects_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    config = parser.parse_args(["--rbln-strict-programs"]).additional_config
    assert RBLNConfig(**config).strict_programs


def test_merge_changes_neither_side() -> None:
    base, over = {"a": {"b": 1}, "c": 1}, {"a": {"d": 2}, "c": {"e": 3}}
    assert merge(base, over) == {"a": {"b": 1, "d": 2}, "c": {"e": 3}}
    assert base == {"a": {"b": 1}, "c": 1}
    assert over == {"a": {"d": 2}, "c": {"e": 3}}
