# SPDX-License-Identifier: Apache-2.0
"""``rbln-vllm compile``: a model into a directory that can be served without the original."""

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rbln_vllm import envs
from rbln_vllm.cli.errors import FAILED, CommandError, OneLineParser, one_line
from rbln_vllm.cli.text_table import byte_size
from rbln_vllm.config.flags import int_list, json_object, plain_type
from rbln_vllm.devices import PROFILES, resolve_profile
from rbln_vllm.optimum.choice import RUNNERS
from rbln_vllm.optimum.drafts import drafts_of
from rbln_vllm.optimum.options import RUNTIME, RBLNModelConfig
from rbln_vllm.toolchain import CaptureError

if TYPE_CHECKING:
    from rbln_vllm.optimum.compiling import CompileJob
    from rbln_vllm.optimum.directory import CompiledDirectory

_ALIASES = {
    "batch_size": "--max-num-seqs",
    "max_seq_len": "--max-model-len",
    "prefill_chunk_size": "--max-num-batched-tokens",
    "kvcache_block_size": "--block-size",
}
"""Options whose flag may also be called as vLLM calls it."""
_NOT_FLAGS = (*RUNTIME, "lora_config")
"""Options that are no flag, or that several flags make."""
_WRONG = (ValueError, TypeError, OSError, NotImplementedError)


def run(arguments: Sequence[str]) -> None:
    """Compile, or say what would be compiled; raises CommandError."""
    options = _parser().parse_args(list(arguments))
    if options.target is not None:
        _dry_run(options)
        return
    if options.output is None:
        raise CommandError("compile: --output DIR says where to put the compiled model")
    try:
        job = _job(options, options.npu or envs.force_npu_name())
        _compile(job, Path(options.output), options.parallel)
    except _WRONG as error:
        raise CommandError(f"compile: {one_line(error)}") from error
    except (CaptureError, RuntimeError) as error:
        raise CommandError(f"compile: {one_line(error)}", FAILED) from error


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="rbln-vllm compile",
        description="Compile a Hugging Face model ahead of time. `rbln-vllm serve DIR` then needs "
        "neither the original weights nor their modules.",
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, or a name on the hub")
    parser.add_argument("--output", "-o", metavar="DIR", help="where to put the compiled model")
    for name, info in RBLNModelConfig.model_fields.items():
        if name not in _NOT_FLAGS:
            _add_option(parser, name, info)
    _add_adapter_options(parser)
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, ...")
    parser.add_argument(
        "--runner",
        choices=list(RUNNERS),
        default="auto",
        help="what it is compiled for, where a model both generates text and embeds; as vLLM's",
    )
    parser.add_argument(
        "--hf-overrides",
        type=json_object,
        metavar="JSON",
        help="fields of the model's configuration to change or to add; as vLLM's",
    )
    parser.add_argument(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="as vLLM's, for --num-speculative-tokens; the method is not part of what is compiled",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="as vLLM's")
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="processes that compile programs"
    )
    parser.add_argument(
        "--target",
        metavar="NPU",
        help=f"compile nothing: show programs, limits and refusals on {', '.join(PROFILES)}",
    )
    parser.add_argument("--json", action="store_true", help="with --target: print JSON")
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, info: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    flags = [flag, *filter(None, [_ALIASES.get(name)])]
    plain, _ = plain_type(info.annotation)
    kind: dict[str, Any] = {"type": int, "metavar": "N"}
    if get_origin(plain) is Literal:
        kind = {"choices": list(get_args(plain))}
    elif get_origin(plain) is tuple:
        kind = {"type": int_list, "metavar": "N,N"}
    elif plain is str:
        kind = {"choices": list(PROFILES)}
    elif plain is bool:
        kind = {"action": "store_true"}
    parser.add_argument(*flags, dest=name, default=None, help=info.description, **kind)


def _add_adapter_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        default=(),
        metavar="NAME=PATH",
        help="adapters that are compiled in, each a directory or a name on the hub",
    )
    parser.add_argument(
        "--max-lora-rank", type=int, metavar="N", help="their largest rank, if it is to be larger"
    )


def _adapters(options: argparse.Namespace) -> dict[str, Any]:
    """The entry ``lora_config``, of adapters whose ids are in the order they are given in."""
    if not options.lora_modules:
        if options.max_lora_rank is not None:
            raise ValueError("--max-lora-rank is of --lora-modules, which are not given")
        return {}
    adapters = []
    for number, module in enumerate(options.lora_modules, start=1):
        name, equals, path = module.partition("=")
        if not (name and equals and path):
            raise ValueError(f"--lora-modules {module}: write NAME=PATH")
        adapters.append({"lora_int_id": number, "lora_name": name, "lora_path": path})
    return {"lora_config": {"adapters": adapters, "max_lora_rank": options.max_lora_rank}}


def _job(options: argparse.Namespace, npu: str | None) -> "CompileJob":
    """Raises ValueError, TypeError or OSError for what cannot be compiled."""
    from rbln_vllm.optimum.compiling import CompileJob

    names = [name for name in RBLNModelConfig.model_fields if name not in _NOT_FLAGS]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    given.update(_adapters(options))
    if options.speculative_config is not None:
        given.setdefault("num_speculative_tokens", drafts_of(options.speculative_config))
    given.setdefault("batch_size", resolve_profile(npu).default_max_num_seqs)
    if npu is not None:
        given["npu"] = npu
    keywords: dict[str, Any] = {"dtype": options.dtype}
    if options.revision is not None:
        keywords["revision"] = options.revision
    if options.trust_remote_code:
        keywords["trust_remote_code"] = True
    if options.hf_overrides is not None:
        keywords["hf_overrides"] = options.hf_overrides
    wanted = RUNNERS[options.runner]
    return CompileJob.of(options.model, RBLNModelConfig.of(given), wanted, **keywords)


def _compile(job: "CompileJob", output: Path, workers: int) -> None:
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr), _progress(len(job.plan.geometry.table.names)) as p:
        directory = job.compile_into(output, workers=workers, progress=p)
    print(summary(directory, time.perf_counter() - started))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc="Compiling", unit="program", disable=None) as bar:

        def done(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield done


def summary(directory: "CompiledDirectory", seconds: float) -> str:
    """Sizes and time, and the command that serves it."""
    manifest = directory.artifact.manifest
    weights = sum(entry.size for entry in manifest.weights.values())
    programs = sum(entry.size for entry in manifest.programs.values())
    return "\n".join(
        (
            f"Compiled {directory.config.source} for {directory.config.npu} in {seconds:.1f} s:",
            f"  programs  {len(manifest.programs)}, {byte_size(programs)}",
            f"  weights   {byte_size(weights)} ({directory.config.dtype})",
            *_adapter_lines(directory),
            f"Serve it with: rbln-vllm serve {directory.path}{_lora_arguments(directory)}",
        )
    )


def _adapter_lines(directory: "CompiledDirectory") -> list[str]:
    if directory.adapters is None:
        return []
    size = sum(entry.size for entry in directory.artifact.manifest.attachments.values())
    return [f"  adapters  {', '.join(directory.adapters.ids)}, {byte_size(size)}"]


def _lora_arguments(directory: "CompiledDirectory") -> str:
    """What a server is told so that every adapter can be asked for by its name."""
    if directory.adapters is None:
        return ""
    modules = (shlex.quote(f"{name}={directory.path}") for name in directory.adapters.ids)
    return f" --enable-lora --lora-modules {' '.join(modules)}"


def _dry_run(options: argparse.Namespace) -> None:
    """Print what ``--target`` asks for; CommandError when the device refuses it."""
    from rbln_vllm.cli.compile_target import TargetReport

    try:
        resolve_profile(options.target, "--target")
        report = TargetReport.of(_job(options, options.target))
    except _WRONG as error:
        raise CommandError(f"compile: {one_line(error)}") from error
    print(json.dumps(report.facts(), indent=1) if options.json else report.text())
    if report.refusals:
        raise CommandError(f"compile: {options.target} refuses this: {'; '.join(report.refusals)}")
