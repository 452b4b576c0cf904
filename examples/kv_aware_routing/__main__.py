# SPDX-License-Identifier: Apache-2.0
"""Serve a model twice behind a `vllm-router` that knows which server holds which prefix.

usage: python -m examples.kv_aware_routing MODEL [--servers 2] [--port 8000] [--sub-block-size 16]
           [--policy kv_aware] [--logs .cache/routing] [any option of `vllm serve`]

Ports of the servers and of their KV events are free ones. An interrupt ends everything.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType

from examples.kv_aware_routing.cluster import KV_AWARE, Cluster
from scripts.server_process import ServerError, free_port, port_problem


def main() -> int:
    """Entry point; returns the exit code."""
    options, extra = parse(sys.argv[1:])
    problem = port_problem(options.port)
    if problem is not None:
        print(f"error: {problem}. Choose another one: --port {free_port()}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        cluster = new_cluster(options, extra)
        print(f"starting {options.servers} servers (logs: {options.logs})", flush=True)
        with cluster:
            print(summary(cluster, options.model), flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print("all ended")
        return 0
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those that every server gets."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("--sub-block-size", type=int, default=16, help="tokens that events name")
    parser.add_argument("--policy", default=KV_AWARE)
    parser.add_argument("--logs", type=Path, default=Path(".cache") / "routing")
    return parser.parse_known_args(arguments)


def new_cluster(options: argparse.Namespace, extra: list[str]) -> Cluster:
    """The cluster that the options describe, not started."""
    return Cluster(
        [options.model, "--rbln-sub-block-size", str(options.sub_block_size), *extra],
        granule=options.sub_block_size,
        logs=options.logs,
        servers=options.servers,
        policy=options.policy,
        port=options.port,
    )


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Leave the `with` block as an interrupt would."""
    raise KeyboardInterrupt


def summary(cluster: Cluster, model: str) -> str:
    """What runs where, and a command that asks it something."""
    lines = ["", f"router   {cluster.router.url}  policy {cluster.policy}"]
    for number, (server, source) in enumerate(zip(cluster.servers, cluster.sources, strict=True)):
        lines.append(f"server {number} {server.url}  KV events {source.endpoint}")
    return "\n".join([*lines, "", question(cluster.router.url, model), ""])


def question(url: str, model: str) -> str:
    """A command for a shell that asks the router something."""
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [message], "temperature": 0})
    header = ["-H", "Content-Type: application/json"]
    return shlex.join(["curl", f"{url}/v1/chat/completions", *header, "-d", body])


if __name__ == "__main__":
    sys.exit(main())
