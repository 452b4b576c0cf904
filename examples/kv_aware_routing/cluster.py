# SPDX-License-Identifier: Apache-2.0
"""Several servers that publish their KV events, behind one `vllm-router`.

with Cluster([model, "--block-size", "128"], granule=128, logs=Path("logs")) as cluster:
    client = openai.OpenAI(base_url=f"{cluster.router.url}/v1", api_key="unused")

All processes are ended, with everything they started, when the block is left.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.server_process import LOCALHOST, ServerError, ServerProcess, fetch, free_port

KV_AWARE = "kv_aware"
# The router tokenises nothing: it asks a server what tokens a text or a chat becomes.
# The other option lets `usage` tell how many tokens of a prompt were found in the cache.
SERVER_OPTIONS = ("--enable-scale-out", "--enable-prompt-tokens-details")


@dataclass(frozen=True)
class EventSource:
    """The ports on which one server publishes its KV events and answers for earlier ones."""

    port: int
    replay_port: int
    buffer_steps: int = 10_000  # after as many messages a full one is sent

    def __post_init__(self) -> None:
        if self.port == self.replay_port:
            raise ValueError(f"live and replayed events share port {self.port}")

    @classmethod
    def choose(cls, buffer_steps: int = 10_000) -> EventSource:
        """Two ports that nothing listens on now."""
        port = free_port()
        while (replay_port := free_port()) == port:
            pass
        return cls(port, replay_port, buffer_steps)

    @property
    def endpoint(self) -> str:
        """Where a subscriber connects."""
        return f"tcp://{LOCALHOST}:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        """Where a subscriber asks for earlier events."""
        return f"tcp://{LOCALHOST}:{self.replay_port}"

    def server_options(self) -> list[str]:
        """`--kv-events-config`. Only an endpoint with a `*` makes vLLM listen."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self.buffer_steps,
        }
        return ["--kv-events-config", json.dumps(config)]


class RouterProcess(ServerProcess):
    """A `vllm-router` of this interpreter's environment for the time of a `with` block."""

    PROGRAM = Path(sys.executable).parent / "vllm-router"

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [str(self.PROGRAM), "--host", LOCALHOST, *arguments]

    def __enter__(self) -> RouterProcess:
        if not self.PROGRAM.exists():
            raise ServerError(f"{self.PROGRAM} is missing: pip install vllm-router")
        super().__enter__()
        return self


class Cluster:
    """Servers with the same arguments, and a router before them, for the time of a `with` block.

    Entering returns when all answer. Raises `ServerError` when one does not come up.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        granule: int,
        logs: Path,
        servers: int = 2,
        policy: str = KV_AWARE,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        router_options: Sequence[str] = (),
        buffer_steps: int = 10_000,
    ) -> None:
        """`arguments` are those of `rbln-vllm serve`; `granule` is the number of tokens that one
        stored event names per hash: the sub-block size, or the block size without sub-blocks."""
        if servers < 1 or granule < 1:
            raise ValueError(f"{servers=} and {granule=} must be positive")
        self.granule = granule
        self.policy = policy
        self.sources = [EventSource.choose(buffer_steps) for _ in range(servers)]
        self.servers = [
            ServerProcess(
                [*arguments, *SERVER_OPTIONS, *source.server_options()],
                log_file=logs / f"server-{number}.log",
                env=env,
            )
            for number, source in enumerate(self.sources)
        ]
        self._log_file, self._options, self._port = logs / "router.log", router_options, port
        self._stack = contextlib.ExitStack()

    def new_router(
        self,
        log_file: Path,
        options: Sequence[str] = (),
        port: int | None = None,
        policy: str | None = None,
    ) -> RouterProcess:
        """A router before the running servers, not started; there may be several at once."""
        policy = policy or self.policy
        urls = [server.url for server in self.servers]
        arguments = ["--worker-urls", *urls, "--policy", policy]
        arguments += ["--prometheus-port", str(free_port()), *options]
        if policy == KV_AWARE:
            arguments += self._event_options()
        return RouterProcess(arguments, log_file=log_file, port=port)

    def _event_options(self) -> list[str]:
        """Events count for requests to the model of this name only."""
        models = json.loads(fetch(f"{self.servers[0].url}/v1/models"))
        options = ["--kv-event-block-size", str(self.granule)]
        options += ["--kv-event-model", models["data"][0]["id"]]
        for server, source in zip(self.servers, self.sources, strict=True):
            options += ["--kv-event-source", f"{server.url}={source.endpoint}"]
            options += ["--kv-event-replay-source", f"{server.url}={source.replay_endpoint}"]
        return options

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            with ThreadPoolExecutor(len(self.servers)) as pool:
                starts = [pool.submit(server.__enter__) for server in self.servers]
            for start in starts:
                if start.exception() is None:
                    stack.push(start.result().__exit__)
            for start in starts:
                start.result()
            self.router = self.new_router(self._log_file, self._options, self._port)
            stack.enter_context(self.router)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
