# SPDX-License-Identifier: Apache-2.0
"""``rbln-vllm inspect``: what a compiled directory holds and what it needs."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbln_vllm.cli.errors import FAILED, CommandError, OneLineParser, one_line
from rbln_vllm.cli.explain import explanation_facts, explanation_text
from rbln_vllm.cli.text_table import byte_size
from rbln_vllm.lora.slots import slot_bytes
from rbln_vllm.models.kv_layers import block_bytes
from rbln_vllm.optimum.directory import CompiledDirectory
from rbln_vllm.toolchain import ProgramReport, ToolchainError, host_toolchain


@dataclass(frozen=True)
class Inspection:
    """A compiled directory; ``reports`` is empty where this machine cannot look into programs."""

    directory: CompiledDirectory
    reports: Mapping[str, ProgramReport]
    doubt: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.directory.artifact.program_names

    def memory(self) -> dict[str, int]:
        """Bytes on the one device: programs share weights and arena."""
        config = self.directory.config
        block = block_bytes(self.directory.kv_layers, config.kvcache_block_size)
        per_sequence = -(-config.max_seq_len // config.kvcache_block_size)
        return {
            "weights": sum(f.size for f in self.directory.artifact.manifest.weights.values()),
            "arena": max((report.arena_bytes for report in self.reports.values()), default=0),
            "kv_block": block,
            "kv_sequence": block * per_sequence,
            "kv_all_sequences": block * per_sequence * config.batch_size,
            **self._adapter_memory(),
        }

    def _adapter_memory(self) -> dict[str, int]:
        adapters = self.directory.adapters
        return {} if adapters is None else {"adapters": slot_bytes(adapters.adapters)}

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        manifest = self.directory.artifact.manifest
        return {
            "path": str(self.directory.path),
            "architecture": manifest.model["architecture"],
            "rbln_config": self.directory.config.to_json(),
            "toolchain": f"{manifest.toolchain} {manifest.toolchain_version}",
            "versions": manifest.key,
            "size": self.directory.artifact.nbytes,
            "memory": self.memory(),
            "programs": explanation_facts(self.names, self.reports),
            "compile_command": self.directory.compile_command,
        }

    def text(self) -> str:
        """As text for people."""
        facts, config = self.facts(), self.directory.config
        shown = {
            **{name: facts[name] for name in ("path", "architecture")},
            **facts["rbln_config"],
            "lora_config": config.lora_config.summary if config.lora_config else "none",
            "toolchain": facts["toolchain"],
            **facts["versions"],
            "size": byte_size(facts["size"]),
        }
        memory = {f"memory {name}": byte_size(size) for name, size in facts["memory"].items()}
        width = max(map(len, [*shown, *memory])) + 2
        lines = [f"{name:{width}}{_plain(value)}" for name, value in {**shown, **memory}.items()]
        programs = f"Programs: {', '.join(self.names)}\n{self.doubt}" if self.doubt else ""
        programs = programs or explanation_text(self.names, self.reports)
        return "\n".join([*lines, "", programs])


def run(arguments: Sequence[str]) -> None:
    """Print what a directory holds; raises CommandError for one that cannot be served."""
    options = _parser().parse_args(list(arguments))
    inspection = _inspect(Path(options.directory), verify=options.verify)
    print(json.dumps(inspection.facts(), indent=1) if options.json else inspection.text())


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="rbln-vllm inspect", description="Show what a compiled directory holds and needs."
    )
    parser.add_argument("directory", metavar="DIR", help="what `rbln-vllm compile` wrote")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verify", action="store_true", help="also read and check every file")
    return parser


def _inspect(path: Path, *, verify: bool) -> Inspection:
    try:
        directory = CompiledDirectory.read(path, host_toolchain())
        if verify:
            directory.verify()
    except ValueError as error:
        raise CommandError(f"inspect: {one_line(error)}", FAILED) from error
    try:
        return Inspection(directory, host_toolchain().explain(directory.artifact))
    except ToolchainError as error:
        return Inspection(directory, {}, f"This machine cannot run them: {one_line(error)}")


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
