# SPDX-License-Identifier: Apache-2.0
"""A real `vllm-router` follows our KV events: requests go where their prefix is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.server_process import ServerProcess
from tests.server.kv_cluster import GRANULE, KVCluster, cached_in
from tests.server.live import MODEL, LiveServer, wait_until

LOG_STYLE = re.compile(r"\x1b\[[0-9;]*m")
DECISION = re.compile(
    r'KV prefix decision outcome="(?P<outcome>\w+)" worker="(?P<worker>[^"]+)"'
    r" input_tokens=(?P<tokens>\d+) \S+ credited_prefix_tokens=(?P<credited>\d+)"
)


@dataclass(frozen=True)
class Decision:
    """One line of the router's log: where a request went, and the hits it expects there."""

    server: str
    tokens: int
    credited: int


def plain_log(router: ServerProcess) -> str:
    """The router's log without colours."""
    return LOG_STYLE.sub("", router.log())


def decisions(router: ServerProcess) -> list[Decision]:
    """All so far, oldest first."""
    found = DECISION.finditer(plain_log(router))
    return [Decision(d["worker"], int(d["tokens"]), int(d["credited"])) for d in found]


def last_decision(router: ServerProcess, number: int) -> Decision:
    """The `number`-th, counted from one; the log may lag behind the answer."""
    wait_until(lambda: len(decisions(router)) >= number, f"decision {number} in the router's log")
    return decisions(router)[number - 1]


def ask(
    cluster: KVCluster, prompt: str | list[int], router: LiveServer | None = None
) -> tuple[Decision, int]:
    """Complete through a router: what it expected, and the tokens that were hit.

    Without fields that vLLM alone knows: a request with such fields goes by load.
    """
    router = router or cluster.router
    number = len(decisions(router.process)) + 1
    completion = router.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    return last_decision(router.process, number), cached_in(completion.usage)


def ask_chat(cluster: KVCluster, *contents: str) -> tuple[Decision, int]:
    """The same for a chat of what the user says."""
    router = cluster.router
    number = len(decisions(router.process)) + 1
    completion = router.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": c} for c in contents], max_tokens=1
    )
    return last_decision(router.process, number), cached_in(completion.usage)


def warm(cluster: KVCluster, server: int, prompt: list[int]) -> None:
    """Let one server alone compute a prompt, and the router hear of it."""
    cluster.ask(server, prompt)
    hear(cluster, cluster.cluster.router, server)


def hear(cluster: KVCluster, router: ServerProcess, server: int) -> None:
    """Wait until the router knows all that one server has told up to now."""
    cluster.catch_up(server)
    known = cluster.subscribers[server].next_sequence - 1
    source = re.escape(cluster.servers[server].url)
    progress = re.compile(rf"sequence advanced source={source} rank=0 seq=(\d+)")

    def knows() -> bool:
        return progress.findall(plain_log(router))[-1:] == [str(known)]

    wait_until(knows, f"the router knows message {known} of server {server}")


class TestPrefixes:
    @pytest.mark.parametrize("holder", [0, 1])
    def test_token_prompts_go_where_their_prefix_is(
        self, kv_cluster: KVCluster, holder: int
    ) -> None:
        prefix = kv_cluster.fresh_prompt(4 * GRANULE)
        warm(kv_cluster, holder, prefix)
        for shared in (1, 2, 3, 4):
            prompt = prefix[: shared * GRANULE] + kv_cluster.fresh_prompt(7)
            decision, hits = ask(kv_cluster, prompt)
            assert decision.server == kv_cluster.servers[holder].url
            assert decision.tokens == len(prompt)
            assert decision.credited == hits == shared * GRANULE

    @pytest.mark.parametrize("holder", [0, 1])
    def test_texts_and_chats_do_too(self, kv_cluster: KVCluster, holder: int) -> None:
        text = f"Server {holder} knows this. " + "You may reproduce and distribute copies. " * 4
        server = kv_cluster.servers[holder]
        server.complete(text, max_tokens=1)
        server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1
        )
        hear(kv_cluster, kv_cluster.cluster.router, holder)
        for decision, hits in (
            ask(kv_cluster, text + " And more."),
            ask_chat(kv_cluster, text, "Go on."),
        ):
            assert decision.server == server.url
            assert decision.credited == hits >= 2 * GRANULE

    def test_a_field_the_router_does_not_know_leaves_it_to_load(
        self, kv_cluster: KVCluster
    ) -> None:
        """As docs/routing.md says; once this fails, it should say otherwise."""
        prompt = kv_cluster.fresh_prompt(2 * GRANULE + 1)
        warm(kv_cluster, 0, prompt)
        number = len(decisions(kv_cluster.cluster.router)) + 1
        kv_cluster.router.complete(prompt, max_tokens=1)  # with return_token_ids
        assert last_decision(kv_cluster.cluster.router, number).credited == 0

    def test_the_longer_prefix_wins(self, kv_cluster: KVCluster) -> None:
        prefix = kv_cluster.fresh_prompt(3 * GRANULE)
        warm(kv_cluster, 0, prefix[: 2 * GRANULE])
        warm(kv_cluster, 1, prefix)
        decision, hits = ask(kv_cluster, [*prefix, 300])
        assert decision.server == kv_cluster.servers[1].url
        assert decision.credited == hits == 3 * GRANULE


class TestOperators:
    def test_a_reset_is_noticed(self, kv_cluster: KVCluster) -> None:
        prompt = kv_cluster.fresh_prompt(3 * GRANULE + 1)
        warm(kv_cluster, 0, prompt)
        kv_cluster.reset(0)
        hear(kv_cluster, kv_cluster.cluster.router, 0)
        decision, hits = ask(kv_cluster, prompt)
        assert decision.credited == hits == 0

    def test_a_router_that_starts_later_learns_what_came_before(
        self, kv_cluster: KVCluster, tmp_path: Path
    ) -> None:
        """Also what has left the replay buffer, which it would refuse without its beginning."""
        prefix = kv_cluster.fresh_prompt(3 * GRANULE)
        kv_cluster.keep_beyond_replay(1, prefix)
        late = kv_cluster.cluster.new_router(tmp_path / "late.log", ["--log-level", "debug"])
        with late:
            hear(kv_cluster, late, 1)
            decision, hits = ask(kv_cluster, [*prefix, 300], LiveServer(late))
            assert decision.server == kv_cluster.servers[1].url
            assert decision.credited == hits == 3 * GRANULE
