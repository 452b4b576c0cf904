# SPDX-License-Identifier: Apache-2.0
"""Serve a compiled directory: what it was compiled for wins over the engine's arguments."""

from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rbln_vllm.config import OptimumRBLNConfig
from rbln_vllm.devices import DeviceProfile
from rbln_vllm.geometry import geometry_of, options_of
from rbln_vllm.optimum.directory import CompiledDirectory
from rbln_vllm.optimum.recorded import RecordedConfig
from rbln_vllm.speculation.draft_models import drafts_by_program
from rbln_vllm.startup.model_impl import is_compiled_directory
from rbln_vllm.toolchain import host_toolchain

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

ARGUMENTS = {
    "max_num_seqs": "batch_size",
    "max_model_len": "max_seq_len",
    "block_size": "kvcache_block_size",
    "dtype": "dtype",
}
"""Engine arguments, and the recorded values that take their place."""
_USED = "the compiled model's value is used"


def take_over(
    args: "EngineArgs", config: OptimumRBLNConfig, profile: DeviceProfile, logger: Logger
) -> OptimumRBLNConfig:
    """Where the model is a compiled directory, set what it was compiled for in ``args``.

    Every value that changes is logged. Returns the options with the directory in them, and
    ``config`` itself for any other model. ValueError for a directory that cannot be served, for
    a chunk it was not compiled for, and for overrides of the model's configuration; RuntimeError
    unless ``--enable-lora`` is given where adapters are compiled in, and nowhere else.
    """
    if not is_compiled_directory(args.model):
        return config
    found = CompiledDirectory.read(Path(args.model), host_toolchain())
    found.check_device(profile.name)
    found.warn_of_other_code(logger)
    _check_unchangeable(args, found)
    args.runner = found.config.runner
    for name, recorded in ARGUMENTS.items():
        _set(args, name, getattr(found.config, recorded), logger)
    _take_over_adapters(args, found, logger)
    args.max_num_batched_tokens = found.config.prefill_chunk_size
    return config.model_copy(
        update={
            "optimum_overrides": _overrides(config, found.config, logger),
            "cached_model_path": str(found.path),
        }
    )


def _check_unchangeable(args: "EngineArgs", found: CompiledDirectory) -> None:
    chunk, compiled = args.max_num_batched_tokens, found.config.prefill_chunk_size
    if chunk is not None and chunk != compiled:
        raise ValueError(
            f"--max-num-batched-tokens {chunk} is not the prefill chunk of the compiled model, "
            f"{compiled}: leave it out, or compile it anew with {found.compile_command}"
        )
    if args.runner not in ("auto", found.config.runner):
        raise ValueError(
            f"--runner {args.runner}, but {found.path} was compiled for {found.config.cls_name}: "
            f"leave it out, or compile the original with --runner {args.runner}"
        )
    if args.enable_prompt_embeds and not found.config.use_inputs_embeds:
        raise ValueError(
            f"--enable-prompt-embeds, but the programs of {found.path} take token ids: leave it "
            f"out, or compile it anew with {found.compile_command} --use-inputs-embeds"
        )
    if args.hf_overrides:
        raise ValueError(
            "--hf-overrides cannot change a compiled model: leave it out, or compile the original "
            "with a changed configuration"
        )


def _set(args: "EngineArgs", name: str, value: Any, logger: Logger) -> None:
    given = getattr(args, name)
    if given not in (None, "auto") and str(given).removeprefix("torch.") != str(value):
        logger.info(
            "--%s is %s in the compiled model, not %s: %s",
            name.replace("_", "-"),
            value,
            given,
            _USED,
        )
    setattr(args, name, value)


def _take_over_adapters(args: "EngineArgs", found: CompiledDirectory, logger: Logger) -> None:
    # vLLM's command line leaves None where the flag is not given.
    if bool(args.enable_lora) != (found.adapters is not None):
        raise RuntimeError(_other_adapters(found))
    if found.adapters is None:
        return
    from vllm.engine.arg_utils import EngineArgs

    shape, defaults = found.adapters.adapters, EngineArgs.__dataclass_fields__
    for name, value in (
        ("max_loras", shape.slots),
        ("max_lora_rank", upstream_rank(shape.rank)),
        ("lora_target_modules", None),
    ):
        given = getattr(args, name)
        if given not in (value, defaults[name].default):
            flag = f"--{name.replace('_', '-')}"
            logger.info("%s is %s in the compiled model, not %s: %s", flag, value, given, _USED)
        setattr(args, name, value)


def _other_adapters(found: CompiledDirectory) -> str:
    if found.adapters is None:
        return (
            f"--enable-lora, but {found.path} was compiled without adapters: leave it out, compile "
            f"them in ({found.compile_command} --lora-modules NAME=PATH), or serve the model that "
            "it was compiled from"
        )
    names = ", ".join(found.adapters.ids)
    return (
        f"{found.path} was compiled with the adapters {names}: give --enable-lora, and for each "
        f"that is asked for by name --lora-modules NAME={found.path}"
    )


def upstream_rank(rank: int) -> int:
    """The least of the ranks that vLLM has which holds ``rank``; ValueError for one above all."""
    from vllm.config.lora import MaxLoRARanks

    ranks = [int(known) for known in get_args(MaxLoRARanks) if known >= rank]
    if not ranks:
        raise ValueError(
            f"adapters of rank {rank} are compiled in, and vLLM has none above "
            f"{max(get_args(MaxLoRARanks))}: compile the model with a smaller max_lora_rank"
        )
    return min(ranks)


def _overrides(
    config: OptimumRBLNConfig, recorded: RecordedConfig, logger: Logger
) -> dict[str, Any]:
    """The decode buckets and the inputs that were compiled; all else that was asked for is
    dropped."""
    kept: dict[str, Any] = {"decoder_batch_sizes": list(recorded.decoder_batch_sizes)}
    if recorded.use_inputs_embeds:
        kept["use_inputs_embeds"] = True
    dropped = {n: v for n, v in config.optimum_overrides.items() if kept.get(n) != v}
    if dropped:
        logger.info("optimum_overrides %s have no effect on a compiled model", dropped)
    return kept


def compiled_path(vllm_config: "VllmConfig") -> Path | None:
    """The compiled directory that a finished configuration serves, if it is one."""
    path = getattr(options_of(vllm_config), "cached_model_path", None)
    return None if path is None else Path(path)


def check_compiled_programs(vllm_config: "VllmConfig") -> None:
    """ValueError when a compiled directory lacks a program that the configuration runs."""
    path = compiled_path(vllm_config)
    if path is not None:
        found = CompiledDirectory.read(path, host_toolchain())
        _check_speculation(vllm_config, found)
        found.check_programs(geometry_of(vllm_config).table.names)


def _check_speculation(vllm_config: "VllmConfig", found: CompiledDirectory) -> None:
    """ValueError for drafts that the directory has no programs for, with what to do."""
    speculation, compiled = vllm_config.speculative_config, found.config.num_speculative_tokens
    if speculation is None:
        return
    if drafts_by_program(vllm_config):
        raise ValueError(
            f"{found.path} holds no programs of a drafter, which the speculative method "
            f"{speculation.method} has: use ngram or suffix, or serve the original by its name"
        )
    wanted = int(speculation.num_speculative_tokens)
    if compiled == 0:
        raise ValueError(
            f"{found.path} was compiled without speculative decoding: leave out "
            f"--speculative-config, or compile it anew with {found.compile_command} "
            f"--num-speculative-tokens {wanted}"
        )
    if wanted != compiled:
        raise ValueError(
            f"{found.path} was compiled for {compiled} drafts, not for {wanted}: set "
            f"num_speculative_tokens to {compiled}, or compile it anew for {wanted}"
        )
