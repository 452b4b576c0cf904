# SPDX-License-Identifier: Apache-2.0
"""One real server shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.kv_cluster import KVCluster, running_cluster
from tests.server.live import LiveServer, running_server, serve_arguments
from tests.server_process import fetch


@pytest.fixture(scope="session")
def shared_server(
    tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """The tiny Llama in fp32 with the sizes of live.py."""
    log_file = tmp_path_factory.mktemp("server") / "log"
    with running_server(serve_arguments(tiny_llama_dir), log_file) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server, idle. After the test it must be as before, and have compiled nothing."""
    yield shared_server
    shared_server.wait_until_idle()
    metrics = shared_server.metrics()
    assert metrics["rbln_programs_compiled_after_ready_total"] == 0
    assert metrics["rbln_requests_refused_for_program_total"] == 0
    fetch(f"{shared_server.url}/health")


@pytest.fixture(scope="session")
def kv_cluster(
    tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KVCluster]:
    """Two servers that publish KV events, and a router."""
    with running_cluster(tiny_llama_dir, tmp_path_factory.mktemp("kv-cluster")) as cluster:
        yield cluster
