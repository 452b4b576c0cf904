# SPDX-License-Identifier: Apache-2.0
"""Each shim for LMCache is still needed; when one of these fails, remove the shim."""

from __future__ import annotations

import inspect
import sys

import pytest

from rbln_vllm import shims


def test_llvmlite_still_misleads_who_looks_through_all_modules() -> None:
    pytest.importorskip("llvmlite", reason="numba is not installed")
    from llvmlite.binding import ffi

    assert not hasattr(vars(ffi.lib), "get")
    with shims.without_llvmlite():
        assert ffi.__name__ not in sys.modules
    assert sys.modules[ffi.__name__] is ffi


def test_lmcache_still_keeps_its_configuration() -> None:
    pytest.importorskip("lmcache", reason="the package lmcache is not installed")
    from lmcache.integration.vllm.utils import lmcache_get_or_create_config

    shims.forget_lmcache_config()
    first = lmcache_get_or_create_config()
    assert lmcache_get_or_create_config() is first
    shims.forget_lmcache_config()
    assert lmcache_get_or_create_config() is not first
    shims.forget_lmcache_config()


def test_lmcache_still_closes_a_socket_under_its_thread() -> None:
    pytest.importorskip("lmcache", reason="the package lmcache is not installed")
    from lmcache.v1.offload_server.zmq_server import ZMQOffloadServer

    source = inspect.getsource(ZMQOffloadServer)
    assert source.index("socket.close") < source.index("thread.join")
    assert "RCVTIMEO" not in source
