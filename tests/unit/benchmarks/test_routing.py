# SPDX-License-Identifier: Apache-2.0
"""The example of KV-aware routing and its benchmark, without processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.routing import Answer
from examples.kv_aware_routing.cluster import Cluster, EventSource


class TestEventSource:
    def test_server_listens_where_subscribers_connect(self) -> None:
        source = EventSource(5557, 5558)
        option, text = source.server_options()
        config = json.loads(text)
        assert option == "--kv-events-config"
        assert config["enable_kv_cache_events"] is True
        # vLLM binds an endpoint with a `*` and connects to all others.
        assert config["endpoint"] == "tcp://*:5557"
        assert source.endpoint.endswith(":5557")
        assert config["replay_endpoint"] == source.replay_endpoint

    def test_has_two_ports(self) -> None:
        source = EventSource.choose()
        assert source.port != source.replay_port
        with pytest.raises(ValueError, match="share port 1"):
            EventSource(1, 1)


class TestCluster:
    @pytest.mark.parametrize(("servers", "granule"), [(0, 16), (2, 0)])
    def test_refuses_nothing_to_serve(self, servers: int, granule: int, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="must be positive"):
            Cluster(["model"], granule=granule, servers=servers, logs=tmp_path)

    def test_servers_have_their_own_ports(self, tmp_path: Path) -> None:
        cluster = Cluster(["model"], granule=16, servers=3, logs=tmp_path)
        ports = [source.port for source in cluster.sources]
        ports += [source.replay_port for source in cluster.sources]
        ports += [server.port for server in cluster.servers]
        assert len(set(ports)) == 9

    def test_round_robin_needs_no_events(self, tmp_path: Path) -> None:
        cluster = Cluster(["model"], granule=16, logs=tmp_path, policy="round_robin")
        router = cluster.new_router(tmp_path / "log")
        command = router.command(["--policy", cluster.policy])
        assert command[-2:] == ["--policy", "round_robin"]


class TestBenchmark:
    def test_prompts_share_prefixes_and_end_differently(self) -> None:
        prompts = routing.workload(40, seed=1)
        heads = {tuple(prompt[: routing.PREFIX_TOKENS[0]]) for prompt in prompts}
        tails = {tuple(prompt[-routing.QUESTION_TOKENS :]) for prompt in prompts}
        assert len(heads) <= routing.PREFIXES
        assert len(tails) == 40
        assert prompts == routing.workload(40, seed=1) != routing.workload(40, seed=2)
        longest = routing.PREFIX_TOKENS[1] + routing.QUESTION_TOKENS + routing.TOKENS_OUT
        assert longest <= routing.MAX_MODEL_LEN

    def test_pool_of_a_server_is_too_small_for_all_prefixes(self) -> None:
        mean = routing.PREFIXES * sum(routing.PREFIX_TOKENS) / 2
        assert mean / 2 < routing.POOL_TOKENS < mean
        assert routing.BLOCK % routing.SUB_BLOCK == 0

    def test_figures(self) -> None:
        answers = [Answer(0.1 * n, 0.2, 100, 50) for n in range(1, 21)]
        row = routing.figures(answers, seconds=4.0)
        assert row["ttft_p50_ms"] == pytest.approx(1050)
        assert row["ttft_p95_ms"] == pytest.approx(2000)
        assert (row["cached_share"], row["requests_per_s"]) == (0.5, 5.0)
        table = routing.markdown({"kv_aware": routing.median_of([row, row, row])})
        assert "| `kv_aware` | 1,050 | 1,050 | 2,000 | 50% | 5.00 |" in table

    def test_more_cached_than_sent_is_refused(self) -> None:
        with pytest.raises(ValueError, match="from the cache"):
            Answer(0.1, 0.1, 10, 10)
