# SPDX-License-Identifier: Apache-2.0
"""Raw engine arguments to ours: the implementation, the options, the device's defaults."""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from rbln_vllm import envs
from rbln_vllm.config import OptimumRBLNConfig, resolve_config
from rbln_vllm.config.overrides import CompileOverrides, check_chunk
from rbln_vllm.devices import DeviceProfile, resolve_profile
from rbln_vllm.optimum.serving import take_over
from rbln_vllm.pooling.rules import prepare_encoder
from rbln_vllm.startup.model_impl import architectures_of, decide_from_engine_args
from rbln_vllm.toolchain import ToolchainError, check_executor

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger("vllm.rbln.engine_args")

NO_CHUNKED_PREFILL = (
    "Chunked prefill cannot be turned off: programs have one prefill length. "
    "Leave out --no-enable-chunked-prefill."
)


def prepare(args: "EngineArgs") -> None:
    """Resolve the implementation and the options in place, and fill in the device's defaults.

    Raises ValueError for anything the selected device or implementation refuses.
    """
    profile = resolve_profile(envs.force_npu_name())
    for warning in (*envs.fold_device_pool(), *envs.check_environment()):
        logger.warning_once(warning)
    if line := profile.dry_run_line():
        logger.info_once(line)
    decision = decide_from_engine_args(args, profile)
    logger.info_once("Model implementation: %s (%s)", decision.impl, decision.reason)
    envs.publish_model_impl(decision.impl)
    args.model_impl = "auto"  # upstream's "transformers" is another backend than ours
    args.additional_config = resolve_config(args.additional_config, decision.impl, profile)
    _check_raw(args)
    encoder = False
    if isinstance(args.additional_config, OptimumRBLNConfig):
        args.additional_config = take_over(args, args.additional_config, profile, logger)
        encoder = prepare_encoder(args, architectures_of(args))
        apply_overrides(args, CompileOverrides.of(args.additional_config.optimum_overrides))
    _fill_defaults(args, profile, encoder=encoder)


def apply_overrides(args: "EngineArgs", overrides: CompileOverrides) -> None:
    """Take sizes from ``optimum_overrides`` where vLLM's arguments do not give them.

    Raises ValueError where both do and disagree, and for a chunk that programs cannot have.
    """
    for name, value in (
        ("max_num_seqs", overrides.batch_size),
        ("max_model_len", overrides.max_seq_len),
        ("max_num_batched_tokens", overrides.prefill_chunk_size),
        ("block_size", overrides.block_size),
    ):
        given = getattr(args, name)
        if value is None:
            continue
        if given is not None and given != value:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"optimum_overrides conflict with vLLM's arguments: {flag} is {given}, the "
                f"override {value}. Give one of the two"
            )
        setattr(args, name, value)
    check_chunk(args.max_num_batched_tokens, "--max-num-batched-tokens")


def _fill_defaults(args: "EngineArgs", profile: DeviceProfile, *, encoder: bool) -> None:
    """The device's values for what the user did not give.

    An encoder has no chunk: what a step computes depends on the longest sequence, which vLLM knows.
    """
    if args.max_num_seqs is None:
        args.max_num_seqs = profile.default_max_num_seqs
    if args.gpu_memory_utilization == _upstream_default("gpu_memory_utilization"):
        args.gpu_memory_utilization = profile.default_gpu_memory_utilization
    if args.max_num_batched_tokens is None and not encoder:
        # A decode step of all sequences must fit the same budget.
        args.max_num_batched_tokens = max(profile.default_chunk, args.max_num_seqs)
    space = envs.kv_cache_space_bytes()
    if space is not None:
        args.kv_cache_memory_bytes = space
    if getattr(args.additional_config, "enforce_model_fp32", False):
        args.dtype = "float32"


def _check_raw(args: "EngineArgs") -> None:
    """Refuse what can only be seen before vLLM resolves it."""
    if args.max_model_len is not None and args.max_model_len < 1:
        raise ValueError(
            f"--max-model-len {args.max_model_len} (-1 is auto) is not supported: programs are "
            "compiled for one length. Give the length, or leave it out for the model's own"
        )
    if args.enable_chunked_prefill is False:
        raise ValueError(NO_CHUNKED_PREFILL)  # vLLM would speak of the batch's size instead
    _check_executor()
    _check_drafter_package(args.speculative_config)
    if args.attention_backend not in (None, "CUSTOM"):
        raise ValueError(f"Cannot use {args.attention_backend} backend on RBLN.")
    if envs.compile_only() and envs.compile_cache_disabled():
        raise ValueError(
            "VLLM_RBLN_COMPILE_ONLY=1 and VLLM_DISABLE_COMPILE_CACHE=1 exclude each other: "
            "there would be nowhere to keep the programs. Unset one"
        )


def _check_drafter_package(speculation: Any) -> None:
    """vLLM names a package whose plain installation would bring another torch, with CUDA."""
    from vllm.utils.import_utils import has_arctic_inference

    method = speculation.get("method") if isinstance(speculation, dict) else None
    if method == "suffix" and not has_arctic_inference():
        raise ValueError(
            "speculative method suffix needs the package arctic-inference 0.1.1, which is not "
            "installed: docs/speculation.md says how to install it without CUDA"
        )


def _check_executor() -> None:
    """Refuse before the model is loaded what cannot run it. Compiling alone needs no executor."""
    if envs.compile_only():
        return
    try:
        check_executor()
    except ToolchainError as error:
        raise ValueError(str(error)) from error


def _upstream_default(name: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs.__dataclass_fields__[name].default
