# SPDX-License-Identifier: Apache-2.0
"""``rbln-vllm cache``: what is in the compile cache, and removing it."""

import argparse
import json
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rbln_vllm import envs
from rbln_vllm.cli.errors import FAILED, CommandError, OneLineParser
from rbln_vllm.cli.text_table import byte_size, text_table
from rbln_vllm.toolchain import Artifact, ProgramCache, ToolchainError, host_toolchain

_TITLES = ("MODEL", "PROFILE", "PROGRAMS", "SIZE", "WRITTEN", "SIGNATURE")


def run(arguments: Sequence[str]) -> None:
    """List, remove or locate; raises CommandError."""
    options = _parser().parse_args(arguments)
    cache = host_toolchain().cache(envs.cache_root() / "rbln", logging.getLogger(__name__))
    if options.action == "path":
        print(cache.root)
    elif options.action == "list":
        _list(cache, options.json)
    else:
        _remove(cache, options)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="rbln-vllm cache",
        description="The compile cache, in $VLLM_CACHE_ROOT/rbln (default ~/.cache/vllm/rbln).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|remove|path")
    listing = actions.add_parser("list", help="show every entry")
    listing.add_argument("--json", action="store_true", help="print JSON, with the whole key")
    remove = actions.add_parser("remove", help="delete entries")
    remove.add_argument("signature", nargs="*", help="an entry's signature, or how it begins")
    remove.add_argument("--all", action="store_true", help="delete every entry")
    actions.add_parser("path", help="print where the cache is")
    return parser


def _list(cache: ProgramCache, as_json: bool) -> None:
    entries = cache.entries()
    if as_json:
        print(json.dumps([_facts(entry) for entry in entries], indent=1))
    elif entries:
        print(text_table(_TITLES, [_row(entry) for entry in entries]))
    else:
        print(f"The compile cache at {cache.root} is empty.")


def _row(entry: Artifact) -> tuple[str, ...]:
    manifest = entry.manifest
    return (
        manifest.label or "?",
        manifest.profile,
        str(len(entry.program_names)),
        byte_size(entry.nbytes),
        f"{datetime.fromtimestamp(entry.written_at):%Y-%m-%d %H:%M}",
        entry.directory.name,
    )


def _facts(entry: Artifact) -> dict[str, Any]:
    return {
        "model": entry.manifest.label,
        "profile": entry.manifest.profile,
        "programs": list(entry.program_names),
        "bytes": entry.nbytes,
        "written_at": datetime.fromtimestamp(entry.written_at).astimezone().isoformat(),
        "signature": entry.directory.name,
        "path": str(entry.directory),
        "key": entry.manifest.key,
    }


def _remove(cache: ProgramCache, options: argparse.Namespace) -> None:
    entries = cache.entries()
    if bool(options.signature) == options.all:
        raise CommandError("cache remove: give signatures (see cache list) or --all")
    chosen = entries if options.all else [_one(entries, start) for start in options.signature]
    for entry in dict.fromkeys(chosen):
        try:
            cache.remove(entry)
        except (ToolchainError, OSError) as error:
            raise CommandError(f"cache remove: {error}", FAILED) from error
        print(f"removed {entry.directory.name} ({entry.manifest.label or '?'})")
    if not chosen:
        print(f"The compile cache at {cache.root} is empty.")


def _one(entries: Sequence[Artifact], start: str) -> Artifact:
    """The entry whose signature begins so; CommandError when there is none or several."""
    found = [entry for entry in entries if entry.directory.name.startswith(start)]
    if not found or not start:
        raise CommandError(f"cache remove: no entry's signature begins with {start!r}")
    if len(found) > 1:
        names = ", ".join(entry.directory.name for entry in found)
        raise CommandError(f"cache remove: {start!r} may be any of {names}; give more of it")
    return found[0]
