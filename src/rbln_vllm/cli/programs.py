# SPDX-License-Identifier: Apache-2.0
"""``rbln-vllm programs``: every program of a configuration, without loading weights.

With ``--explain`` also what those that are compiled cost, and how much of them is native.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rbln_vllm import envs
from rbln_vllm.cli.errors import CommandError, one_line
from rbln_vllm.cli.explain import explanation_facts, explanation_text
from rbln_vllm.cli.text_table import text_table
from rbln_vllm.programs import ProgramTable
from rbln_vllm.toolchain import (
    Artifact,
    CacheKey,
    ProgramCache,
    ProgramReport,
    ToolchainError,
    host_toolchain,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rbln_vllm.geometry import Geometry

_TITLES = ("PROGRAM", "ROLE", "BATCH", "QUERY", "TOKENS", "CACHED")
_CACHED = {True: "yes", False: "no", None: "?"}


@dataclass(frozen=True)
class Report:
    """What is printed: sizes, where the cache entry is or would be, and the programs in it.

    ``entry`` and ``cached`` are None when the weights, which the cache key digests, are not on
    this machine; ``explained`` is None when nobody asked.
    """

    geometry: "Geometry"
    entry: Path | None
    cached: frozenset[str] | None
    explained: Mapping[str, ProgramReport] | None = None

    @property
    def table(self) -> ProgramTable:
        return self.geometry.table

    def is_cached(self, name: str) -> bool | None:
        return None if self.cached is None else name in self.cached

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        explained: dict[str, Any] = {}
        if self.explained is not None:
            explained["explained"] = explanation_facts(self.table.names, self.explained)
        return {
            **explained,
            "geometry": _sizes(self.geometry),
            "cache_entry": None if self.entry is None else str(self.entry),
            "programs": [
                {
                    "name": key.name,
                    "role": str(key.role),
                    "batch": key.batch,
                    "query": key.query,
                    "tokens": key.num_tokens,
                    "cached": self.is_cached(key.name),
                }
                for key in self.table.programs
            ],
        }

    def text(self) -> str:
        """As text for people."""
        entry = "unknown: the model's weights are not here" if self.entry is None else self.entry
        sizes = {**_sizes(self.geometry), "cache_entry": entry}
        width = max(map(len, sizes)) + 2
        lines = [f"{name:{width}}{_plain(value)}" for name, value in sizes.items()]
        rows = [
            (
                key.name,
                str(key.role),
                str(key.batch),
                str(key.query),
                str(key.num_tokens),
                _CACHED[self.is_cached(key.name)],
            )
            for key in self.table.programs
        ]
        lines += ["", text_table(_TITLES, rows)]
        if self.explained is not None:
            lines += ["", explanation_text(self.table.names, self.explained)]
        return "\n".join(lines)


def run(arguments: Sequence[str]) -> None:
    """Print the table; raises CommandError for a configuration that is refused."""
    with redirect_stdout(sys.stderr), _quiet():  # stdout is for the table alone
        options = _parse(arguments)
        report = _report(options)
    print(json.dumps(report.facts(), indent=1) if options.json else report.text())


@contextmanager
def _quiet() -> Iterator[None]:
    """No logs: what matters comes as the exception that ends the command."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise CommandError(f"programs: {one_line(message)}")

    parser = make_arg_parser(
        Parser(
            prog="rbln-vllm programs",
            description="Show every program that `rbln-vllm serve` with the same arguments runs.",
        )
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="show commands, native share, flops and memory of the programs that are compiled",
    )
    options: argparse.Namespace = parser.parse_args(list(arguments))
    if options.model_tag is not None:
        options.model = options.model_tag
    return options


def _report(options: argparse.Namespace) -> Report:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rbln_vllm.geometry import geometry_of
    from rbln_vllm.optimum.serving import compiled_path

    try:
        config = AsyncEngineArgs.from_cli_args(options).create_engine_config()
        cache = host_toolchain().cache(envs.cache_root() / "rbln", logging.getLogger(__name__))
        geometry, key = geometry_of(config), _cache_key(config, cache)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise CommandError(f"programs: {_reason(error)}") from error
    compiled = compiled_path(config)
    if compiled is not None:
        artifact = Artifact.read(compiled)
        found = _explained(artifact) if options.explain else None
        return Report(geometry, compiled, frozenset(artifact.program_names), found)
    if key is None:
        return Report(geometry, None, None, {} if options.explain else None)
    entry = next((e for e in cache.entries() if e.manifest.key == dict(key.parts)), None)
    names = frozenset(() if entry is None else entry.program_names)
    return Report(geometry, cache.path(key), names, _explained(entry) if options.explain else None)


def _explained(entry: Artifact | None) -> Mapping[str, ProgramReport]:
    """What is compiled; CommandError when it is damaged or cannot run on this machine."""
    if entry is None:
        return {}
    try:
        return host_toolchain().explain(entry)
    except ToolchainError as error:
        raise CommandError(f"programs: {one_line(error)}") from error


def _cache_key(config: "VllmConfig", cache: ProgramCache) -> CacheKey | None:
    """The key, or None when computing it would have to fetch the weights."""
    from rbln_vllm.models.content import cache_key

    dummy = config.load_config.load_format == "dummy"
    if not dummy and not _weights_are_here(config):
        return None
    return cache_key(config, host_toolchain(), cache.digest)


def _weights_are_here(config: "VllmConfig") -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from rbln_vllm.models.content import WEIGHT_PATTERNS

    model = config.model_config
    source = str(model.model_weights or model.model)
    directory = Path(source)
    if not directory.is_dir():
        try:
            found = snapshot_download(source, revision=model.revision, local_files_only=True)
        except LocalEntryNotFoundError:
            return False
        directory = Path(found)
    return any(next(directory.glob(pattern), None) for pattern in WEIGHT_PATTERNS)


def _sizes(geometry: "Geometry") -> dict[str, Any]:
    return {
        "profile": geometry.profile.name,
        "chunk": geometry.chunk,
        "block_size": geometry.block_size,
        "max_model_len": geometry.max_model_len,
        "max_num_seqs": geometry.max_num_seqs,
        "blocks_per_sequence": geometry.num_blocks_per_seq,
        "decode_buckets": list(geometry.decode_buckets),
    }


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _reason(error: Exception) -> str:
    """The message alone; pydantic wraps it in lines about fields and links."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        messages = [str(item["msg"]).removeprefix("Value error, ") for item in error.errors()]
        return one_line("; ".join(messages))
    return one_line(error)
