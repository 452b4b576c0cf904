# SPDX-License-Identifier: Apache-2.0
"""Forking is safe where it is allowed, and not allowed elsewhere."""

import _thread
import os
import subprocess
import sys
import threading

import pytest
import torch  # noqa: F401 (brings OpenMP)

from rbln_vllm import envs
from rbln_vllm.startup import start_method
from rbln_vllm.startup.start_method import engines_may_fork

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
REGIONS_IN_PARENT_AND_CHILD = """
import faulthandler, os, sys, torch
from rbln_vllm.startup.start_method import release_openmp_before_forks
patience = 3
if "release" in sys.argv:
    release_openmp_before_forks()
    release_openmp_before_forks()
    patience = 60
torch.set_num_threads(2)
region = lambda: torch.ones(1 << 21).exp().sum()
region()
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(patience, exit=True)
    region()
    os._exit(0)
region()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("release", "code"), [("release", 0), ("keep", 1)])
def test_openmp_survives_a_fork_when_it_is_released(release: str, code: int) -> None:
    """Without the release the child waits for threads it does not have, until it is ended."""
    script = [sys.executable, "-c", REGIONS_IN_PARENT_AND_CHILD, release]
    assert subprocess.run(script, capture_output=True, check=False).returncode == code


def test_a_plain_script_may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RBLN_HOST_EXECUTOR", raising=False)
    monkeypatch.setattr(start_method, "_python_threads", lambda: 1)
    assert engines_may_fork()
    monkeypatch.setenv("RBLN_HOST_EXECUTOR", "reference")
    assert not engines_may_fork()


def test_a_process_with_threads_may_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RBLN_HOST_EXECUTOR", raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # it does not know of all
    begun, done = threading.Event(), threading.Event()

    def wait_until_done() -> None:
        begun.set()
        done.wait()

    _thread.start_new_thread(wait_until_done, ())
    begun.wait()
    try:
        assert not engines_may_fork()
    finally:
        done.set()


@pytest.mark.parametrize(
    ("value", "may_fork", "after"),
    [("fork", False, "fork"), ("spawn", True, "spawn"), (None, True, None), (None, False, "spawn")],
)
def test_the_users_start_method_stays(
    value: str | None, may_fork: bool, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METHOD, "")
    if value is None:
        monkeypatch.delenv(METHOD)
    else:
        monkeypatch.setenv(METHOD, value)
    with envs.start_method_kept(may_fork):
        os.environ[METHOD] = "spawn"
    assert os.environ.get(METHOD) == after
