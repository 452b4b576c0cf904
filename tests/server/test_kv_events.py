# SPDX-License-Identifier: Apache-2.0
"""KV events of a real server over ZMQ: who follows them knows what the next request will hit."""

from __future__ import annotations

import random

import pytest

from tests.server.kv_cluster import GRANULE, KVCluster
from tests.server.live import MAX_LEN


class TestMirror:
    """An index built only from messages, beside `usage.prompt_tokens_details.cached_tokens`."""

    @pytest.mark.parametrize("shared", [1, 2, 3, 4])
    @pytest.mark.parametrize("beyond", [-1, 0, 1])
    def test_predicts_the_hits_of_a_shared_prefix(
        self, kv_cluster: KVCluster, shared: int, beyond: int
    ) -> None:
        base = kv_cluster.fresh_prompt(4 * GRANULE + 2)
        kv_cluster.ask(0, base)
        kv_cluster.catch_up(0)
        other = kv_cluster.branch(base, shared * GRANULE + beyond)
        predicted = kv_cluster.subscribers[0].mirror.hit_tokens(other)
        assert predicted == (shared if beyond >= 0 else shared - 1) * GRANULE
        assert kv_cluster.ask(0, other) == predicted

    @pytest.mark.parametrize("beyond", [-1, 0, 1])
    def test_predicts_the_hits_of_a_repeated_prompt(
        self, kv_cluster: KVCluster, beyond: int
    ) -> None:
        prompt = kv_cluster.fresh_prompt(3 * GRANULE + beyond)
        kv_cluster.ask(0, prompt)
        kv_cluster.catch_up(0)
        predicted = kv_cluster.subscribers[0].mirror.hit_tokens(prompt)
        assert predicted == (3 if beyond == 1 else 2) * GRANULE
        assert kv_cluster.ask(0, prompt) == predicted

    def test_knows_generated_tokens(self, kv_cluster: KVCluster) -> None:
        prompt = kv_cluster.fresh_prompt(GRANULE - 4)
        answer = kv_cluster.servers[0].tokens(prompt, max_tokens=GRANULE)
        kv_cluster.catch_up(0)
        turn = [*prompt, *answer, *kv_cluster.fresh_prompt(5)]
        assert kv_cluster.subscribers[0].mirror.hit_tokens(turn) == GRANULE
        assert kv_cluster.ask(0, turn) == GRANULE

    def test_predicts_every_request_of_random_traffic(self, kv_cluster: KVCluster) -> None:
        generator = random.Random(7)
        roots = [kv_cluster.fresh_prompt(MAX_LEN) for _ in range(5)]
        mirror = kv_cluster.subscribers[0].mirror
        removed = mirror.removed
        hits = 0
        for _ in range(40):
            prompt = generator.choice(roots)[: generator.randrange(1, MAX_LEN - 2 * GRANULE)]
            prompt = prompt + kv_cluster.fresh_prompt(generator.randrange(1, GRANULE))
            kv_cluster.catch_up(0)
            predicted = mirror.hit_tokens(prompt)
            assert kv_cluster.ask(0, prompt) == predicted
            hits += predicted
        assert hits > 0
        assert mirror.removed > removed, "the pool is meant to be too small for this traffic"


class TestOperators:
    def test_reset_clears_the_mirror(self, kv_cluster: KVCluster) -> None:
        prompt = kv_cluster.fresh_prompt(2 * GRANULE + 1)
        kv_cluster.ask(0, prompt)
        kv_cluster.catch_up(0)
        mirror = kv_cluster.subscribers[0].mirror
        cleared = mirror.cleared
        assert mirror.hit_tokens(prompt) == 2 * GRANULE
        kv_cluster.reset(0)
        kv_cluster.catch_up(0)
        assert mirror.cleared > cleared
        assert mirror.hit_tokens(prompt) == kv_cluster.ask(0, prompt) == 0

    def test_late_subscriber_learns_what_came_before(self, kv_cluster: KVCluster) -> None:
        for _ in range(3):
            kv_cluster.ask(0, kv_cluster.fresh_prompt(2 * GRANULE))
        with kv_cluster.new_subscriber(0) as late:
            kv_cluster.catch_up(0, late)
            assert late.mirror.held == kv_cluster.subscribers[0].mirror.held

    def test_late_subscriber_learns_what_left_the_replay_buffer(
        self, kv_cluster: KVCluster
    ) -> None:
        prompt = kv_cluster.fresh_prompt(3 * GRANULE + 1)
        kv_cluster.keep_beyond_replay(1, prompt)
        with kv_cluster.new_subscriber(1) as late:
            kv_cluster.catch_up(1, late)
            assert late.mirror.hit_tokens(prompt) == kv_cluster.ask(1, prompt) == 3 * GRANULE
            assert late.mirror.held.keys() == kv_cluster.subscribers[1].mirror.held.keys()

    def test_two_servers_give_the_same_hashes(self, kv_cluster: KVCluster) -> None:
        prompt = kv_cluster.fresh_prompt(4 * GRANULE)
        chains = []
        for number in (0, 1):
            kv_cluster.ask(number, prompt)
            kv_cluster.catch_up(number)
            chains.append(kv_cluster.subscribers[number].mirror.chain(prompt))
        assert len(set(chains[0])) == 4
        assert chains[0] == chains[1]
