# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks of a platform."""

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

from rbln_vllm import envs
from rbln_vllm.devices import resolve_profile
from rbln_vllm.pooling.config import is_encoder_only
from rbln_vllm.shims import without_llvmlite
from rbln_vllm.startup.start_method import engines_may_fork

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

ATTENTION_BACKEND = "rbln_vllm.models.attention.PagedAttentionBackend"
WORKER = "rbln_vllm.worker.worker.RBLNWorker"
SCHEDULER = "rbln_vllm.core.scheduler.RBLNScheduler"
ENCODER_SCHEDULER = "rbln_vllm.core.encoder_scheduler.EncoderScheduler"
ASYNC_ENCODER_SCHEDULER = "rbln_vllm.core.encoder_scheduler.AsyncEncoderScheduler"
ASYNC_SCHEDULER = "rbln_vllm.core.scheduler.RBLNAsyncScheduler"
IR_PROVIDER = "rbln"


class RblnPlatform(CpuPlatform):
    """Static-shape programs on the HOST device.

    ``_enum`` is OOT, not CPU: vLLM then keeps weights unpacked and layers in plain torch, which
    is what can be captured. The device type stays ``cpu``, since tensors are the host's.
    """

    _enum = PlatformEnum.OOT
    ray_device_key = "RBLN"
    device_control_env_var = "RBLN_VISIBLE_DEVICES"
    # vLLM's inductor code in the sampler takes 20 s at the first request that needs it.
    simple_compile_backend = "eager"

    # Of the engine this process serves; vLLM's hooks on requests are not given a configuration.
    _max_model_len: int | None = None

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        if parser is not None:
            from rbln_vllm.config.flags import add_flags

            add_flags(parser)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return resolve_profile(envs.force_npu_name()).name

    @classmethod
    def import_ir_kernels(cls) -> None:
        import rbln_vllm.models.ir_kernels  # noqa: F401

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        with without_llvmlite():
            super().register_triton_kernel_overrides()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        from vllm.config.kernel import IrOpPriorityConfig

        return IrOpPriorityConfig.with_default(
            ["native"],
            rms_norm=[IR_PROVIDER, "native"],
            fused_add_rms_norm=[IR_PROVIDER, "native"],
        )

    @classmethod
    def get_attn_backend_cls(cls, *_args: Any, **_kwargs: Any) -> str:
        return ATTENTION_BACKEND

    @classmethod
    def opaque_attention_op(cls) -> bool:
        # Attention must be seen while a program is captured.
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        # Programs take one block table for all layers, so layers with and without a window
        # share one group of blocks.
        return False

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.custom_ops = ["none"]
        compilation.ir_enable_torch_wrap = False

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuse what cannot be served and settle sizes; runs again in the engine process."""
        from rbln_vllm.core.kv_cache import rules as sub_block_rules
        from rbln_vllm.optimum import serving
        from rbln_vllm.pooling import rules as pooling_rules
        from rbln_vllm.startup import engine_rules, schedule_ahead

        if vllm_config.model_config is None:
            super().check_and_update_config(vllm_config)
            return
        profile = resolve_profile(envs.force_npu_name())
        engine_rules.refuse_unbuilt(vllm_config)
        pooling_rules.settle_pooling(vllm_config)
        engine_rules.settle_block_size(vllm_config, profile)
        sub_block_rules.check_prefix_caching(vllm_config)
        block_size = vllm_config.cache_config.block_size
        executor = vllm_config.parallel_config.distributed_executor_backend
        schedules_ahead = schedule_ahead.may_schedule_ahead(vllm_config)
        with envs.kv_cache_space_hidden(), envs.start_method_kept(engines_may_fork()):
            super().check_and_update_config(vllm_config)
        # Upstream's CPU rules: a block size of its own, a process just to bind threads in, and no
        # scheduling ahead.
        vllm_config.cache_config.block_size = block_size
        vllm_config.parallel_config.distributed_executor_backend = executor
        vllm_config.scheduler_config.async_scheduling = schedules_ahead
        cls._use_our_classes(vllm_config)
        cls._max_model_len = vllm_config.model_config.max_model_len
        envs.park_idle_openmp_threads()
        engine_rules.log_geometry(vllm_config)
        serving.check_compiled_programs(vllm_config)

    def get_max_output_tokens(self, prompt_len: int) -> int:
        """Tokens a prompt leaves room for.

        ValueError for a prompt that fills the context: vLLM would complain of ``max_tokens`` 0
        and name neither the prompt nor the limit.
        """
        limit = self._max_model_len
        if limit is None:
            return int(super().get_max_output_tokens(prompt_len))
        if prompt_len >= limit:
            raise ValueError(
                f"the prompt has {prompt_len} tokens and leaves no room for output: this model's "
                f"maximum context length is {limit} tokens, prompt and output together. Shorten "
                f"the prompt to at most {limit - 1} tokens"
            )
        return limit - prompt_len

    @classmethod
    def _scheduler(cls, vllm_config: "VllmConfig") -> str:
        is_ahead = vllm_config.scheduler_config.async_scheduling
        if is_encoder_only(vllm_config.model_config):
            return ASYNC_ENCODER_SCHEDULER if is_ahead else ENCODER_SCHEDULER
        return ASYNC_SCHEDULER if is_ahead else SCHEDULER

    @classmethod
    def _use_our_classes(cls, vllm_config: "VllmConfig") -> None:
        from rbln_vllm.startup.schedule_ahead import OVERLAPPED_EXECUTOR

        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        if parallel.worker_cls in ("auto", "vllm.v1.worker.cpu_worker.CPUWorker"):
            parallel.worker_cls = WORKER
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = cls._scheduler(vllm_config)
        if scheduler.async_scheduling and parallel.distributed_executor_backend == "uni":
            # Upstream's runs a step within the call, so nothing would happen meanwhile.
            parallel.distributed_executor_backend = OVERLAPPED_EXECUTOR
        vllm_config.model_config.disable_cascade_attn = True
