# SPDX-License-Identifier: Apache-2.0
"""Two servers with the tiny model behind a `vllm-router`, and what their events say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from openai.types import CompletionUsage

from examples.kv_aware_routing.cluster import Cluster
from tests.models import VOCAB_SIZE
from tests.server.kv_mirror import Subscriber
from tests.server.live import (
    FIRST_WORD,
    KEPT_CACHE,
    LiveServer,
    serve_arguments,
    server_environment,
)

GRANULE = 16
# Five of the longest sequences: traffic soon drives out what is older.
POOL_BLOCKS = 41
# The numbers of messages start anew several times in these tests.
BUFFER_STEPS = 60


class KVCluster:
    """The running cluster, with a subscriber to each server."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.servers = [LiveServer(process) for process in cluster.servers]
        self.router = LiveServer(cluster.router)
        self.subscribers: list[Subscriber] = []
        self._numbers = itertools.count()

    def fresh_prompt(self, length: int) -> list[int]:
        """Random tokens that no earlier prompt begins with."""
        generator = random.Random(f"kv cluster {next(self._numbers)}")
        return [generator.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(length)]

    def branch(self, prompt: list[int], shared: int) -> list[int]:
        """A prompt that shares exactly its first `shared` tokens with `prompt`."""
        tail = self.fresh_prompt(GRANULE)
        tail[0] = next(token for token in (FIRST_WORD, FIRST_WORD + 1) if token != prompt[shared])
        return prompt[:shared] + tail

    def ask(self, server: int, prompt: list[int], max_tokens: int = 1) -> int:
        """Complete on one server; returns the tokens it found in its cache."""
        return cached_in(self.servers[server].complete(prompt, max_tokens=max_tokens).usage)

    def catch_up(self, server: int, *others: Subscriber) -> None:
        """Let the server's mirror, and others of that server, take in every event up to now."""
        marker = self.fresh_prompt(GRANULE + 1)
        self.ask(server, marker)
        for subscriber in (self.subscribers[server], *others):
            subscriber.follow_until(marker, GRANULE)

    def keep_beyond_replay(self, server: int, prompt: list[int]) -> None:
        """Hold the prompt until its announcement has left the server's replay buffer."""
        self.ask(server, prompt)
        self.catch_up(server)
        epoch = self.subscribers[server].epoch
        while self.subscribers[server].epoch == epoch:
            self.catch_up(server)
            self.ask(server, prompt)  # not forgotten meanwhile

    @contextmanager
    def new_subscriber(self, server: int) -> Iterator[Subscriber]:
        """One that receives: until a subscription holds, messages pass it by."""
        source = self.cluster.sources[server]
        with Subscriber(source.endpoint, source.replay_endpoint, GRANULE) as subscriber:
            while not subscriber.poll():
                self.ask(server, self.fresh_prompt(GRANULE + 1))
            yield subscriber

    def reset(self, server: int) -> None:
        """Drop all that is cached."""
        client = httpx.Client(trust_env=False)  # this machine, so through no proxy
        client.post(f"{self.servers[server].url}/reset_prefix_cache").raise_for_status()


def cached_in(usage: CompletionUsage | None) -> int:
    """`usage.prompt_tokens_details.cached_tokens`."""
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


@contextmanager
def running_cluster(model_dir: Path, logs: Path) -> Iterator[KVCluster]:
    """Both servers, the router, and the subscribers for the time of the block."""
    arguments = serve_arguments(
        model_dir, num_gpu_blocks_override=POOL_BLOCKS, rbln_sub_block_size=GRANULE
    )
    environment = {
        **server_environment(KEPT_CACHE),
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    cluster = Cluster(
        arguments,
        granule=GRANULE,
        logs=logs,
        env=environment,
        router_options=["--log-level", "debug"],
        buffer_steps=BUFFER_STEPS,
    )
    with cluster, ExitStack() as stack:
        running = KVCluster(cluster)
        for number in range(len(running.servers)):
            running.subscribers.append(stack.enter_context(running.new_subscriber(number)))
        yield running
