# SPDX-License-Identifier: Apache-2.0
"""Which model implementation serves a model: vLLM's modules or the transformers implementation.

`decide` is pure: everything it looks at is in `ImplRequest`. `decide_from_engine_args` fills the
request from vLLM's engine arguments and the environment.
"""

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from rbln_vllm import envs
from rbln_vllm.config import CONFIG_CLASSES, ModelImpl
from rbln_vllm.devices import DeviceProfile
from rbln_vllm.models.architectures import built

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

# vLLM only shows loggers below its own name.
logger = logging.getLogger("vllm.rbln.model_impl")

ARTIFACT_MANIFEST = "rbln_config.json"

_ALIASES: dict[str, ModelImpl] = {
    "vllm": "vllm",
    "transformers": "transformers",
    "optimum": "transformers",
}


class Selector(StrEnum):
    """What decided."""

    OBJECT = "the config object in additional_config"
    OPTION = "--model-impl"
    VARIABLE = "VLLM_RBLN_USE_VLLM_MODEL"
    PARENT = "the parent process"
    AUTO = "--model-impl auto"


# What to do when the device cannot run the vllm implementation, by what selected it.
_DEVICE_REMEDY = {
    Selector.OBJECT: "pass an OptimumRBLNConfig",
    Selector.OPTION: "use --model-impl optimum",
    Selector.VARIABLE: "unset VLLM_RBLN_USE_VLLM_MODEL",
    Selector.PARENT: "start the parent process with --model-impl optimum",
    Selector.AUTO: "use a model the transformers implementation has",
}


@dataclass(frozen=True)
class ImplRequest:
    """Everything the decision looks at.

    env: the deprecated VLLM_RBLN_USE_VLLM_MODEL, None when unset. published: what a parent process
    decided. hf_config_loader: architectures of the model after hf_overrides; raises ValueError
    or OSError when the config cannot be read, and is called only if nothing else decides.
    """

    model_impl: object
    additional_config: object
    env: bool | None
    published: str | None
    model: str
    hf_config_loader: Callable[[], Sequence[str]]
    profile: DeviceProfile
    registry: Collection[str] = built()


@dataclass(frozen=True)
class ImplDecision:
    """The implementation, why, what decided, and warnings to log."""

    impl: ModelImpl
    reason: str
    selector: Selector
    warnings: tuple[str, ...] = ()


def decide(request: ImplRequest) -> ImplDecision:
    """Runs the ladder: object, `--model-impl`, deprecated variable or parent, then `auto`.

    Raises ValueError for an unknown `--model-impl`, for selectors that disagree, for a device that
    cannot run the vllm implementation, and for vllm with a directory of compiled programs.
    """
    decision = _explicit(request)
    if decision is not None:
        decision = _against_variable(decision, request.env)
    else:
        decision = _inherited(request) or _auto(request)
    _check_device(decision, request)
    if decision.impl != "transformers" and is_compiled_directory(request.model):
        raise ValueError(
            f"{decision.reason} selects {decision.impl}, but {request.model} holds a compiled "
            "model of the transformers implementation: use --model-impl transformers or auto"
        )
    return decision


def parse_model_impl(value: object) -> ModelImpl | None:
    """The canonical name; None for `auto`. ValueError for anything else, listing what is known."""
    if value == "auto":
        return None
    if isinstance(value, str) and value in _ALIASES:
        return _ALIASES[value]
    raise ValueError(
        f"unsupported model implementation {value!r}: --model-impl takes auto, "
        f"{', '.join(_ALIASES)}"
    )


def is_compiled_directory(path: str) -> bool:
    """True if `path` is a directory that holds a compiled artifact."""
    return bool(path) and (Path(path) / ARTIFACT_MANIFEST).is_file()


def _explicit(request: ImplRequest) -> ImplDecision | None:
    """Rungs 1 and 2: what the user said in so many words."""
    option = parse_model_impl(request.model_impl)
    for impl, cls in CONFIG_CLASSES.items():
        if not isinstance(request.additional_config, cls):
            continue
        if option not in (None, impl):
            raise ValueError(
                f"--model-impl {request.model_impl} disagrees with the {cls.__name__} in "
                "additional_config: pass the matching class or leave --model-impl at auto"
            )
        return ImplDecision(impl, f"additional_config is a {cls.__name__}", Selector.OBJECT)
    if option is None:
        return None
    return ImplDecision(option, f"--model-impl {request.model_impl}", Selector.OPTION)


def _against_variable(decision: ImplDecision, env: bool | None) -> ImplDecision:
    """An explicit answer and the deprecated variable must agree."""
    if env is None:
        return decision
    if _impl_of(env) != decision.impl:
        raise ValueError(
            f"{decision.reason} selects {decision.impl}, but {Selector.VARIABLE} selects "
            f"{_impl_of(env)}: unset {Selector.VARIABLE}, which is deprecated"
        )
    return ImplDecision(decision.impl, decision.reason, decision.selector, (_deprecation(env),))


def _inherited(request: ImplRequest) -> ImplDecision | None:
    """Rungs 3 and 4. A parent that published has already weighed the variable."""
    if request.published is not None:
        impl = parse_model_impl(request.published)
        if impl is not None:
            return ImplDecision(impl, "resolved by the parent process", Selector.PARENT)
    if request.env is None:
        return None
    impl = _impl_of(request.env)
    reason = f"{Selector.VARIABLE}={int(request.env)}"
    return ImplDecision(impl, reason, Selector.VARIABLE, (_deprecation(request.env),))


def _auto(request: ImplRequest) -> ImplDecision:
    """Rung 5: an artifact or a known architecture is transformers, everything else is vllm."""
    if is_compiled_directory(request.model):
        reason = f"{request.model} holds a compiled model"
        return ImplDecision("transformers", reason, Selector.AUTO)
    try:
        architectures = request.hf_config_loader()
    except (ValueError, OSError) as error:
        warning = f"cannot read the config of {request.model}, so vllm is assumed: {error}"
        return ImplDecision("vllm", "the model config is unreadable", Selector.AUTO, (warning,))
    known = [name for name in architectures if name in request.registry]
    if known:
        reason = f"the transformers implementation has {known[0]}"
        return ImplDecision("transformers", reason, Selector.AUTO)
    names = ", ".join(architectures) or "a model that names no architecture"
    reason = f"the transformers implementation has nothing for {names}"
    return ImplDecision("vllm", reason, Selector.AUTO)


def _check_device(decision: ImplDecision, request: ImplRequest) -> None:
    profile = request.profile
    if decision.impl in profile.implementations:
        return
    remedy = _DEVICE_REMEDY[decision.selector]
    raise ValueError(
        f"{profile.name} cannot run the {decision.impl} implementation, selected by "
        f"{decision.selector} ({decision.reason}): {remedy}"
    )


def _impl_of(use_vllm_model: bool) -> ModelImpl:
    return "vllm" if use_vllm_model else "transformers"


def _deprecation(use_vllm_model: bool) -> str:
    flag = "vllm" if use_vllm_model else "optimum"
    return f"{Selector.VARIABLE} is deprecated and removed in 0.14.0: use --model-impl {flag}"


def decide_from_engine_args(args: "EngineArgs", profile: DeviceProfile) -> ImplDecision:
    """`decide` for vLLM's engine arguments and this process's environment; logs the warnings."""
    from vllm.transformers_utils.utils import maybe_model_redirect

    model = maybe_model_redirect(args.hf_config_path or args.model)
    request = ImplRequest(
        model_impl=args.model_impl,
        additional_config=args.additional_config,
        env=envs.use_vllm_model(),
        published=envs.published_model_impl(),
        model=model,
        hf_config_loader=functools.partial(_load_architectures, args, model),
        profile=profile,
    )
    decision = decide(request)
    for warning in decision.warnings:
        _warn_once(warning)
    return decision


def architectures_of(args: "EngineArgs") -> tuple[str, ...]:
    """Architectures of the model after `hf_overrides`; none when its config cannot be read."""
    from vllm.transformers_utils.utils import maybe_model_redirect

    try:
        return _load_architectures(args, maybe_model_redirect(args.hf_config_path or args.model))
    except (OSError, ValueError):  # vLLM says what is wrong with it
        return ()


def _load_architectures(args: "EngineArgs", model: str) -> tuple[str, ...]:
    """Architectures after `hf_overrides`, of which nested dicts are left to vLLM."""
    from vllm.transformers_utils.config import get_config

    overrides = args.hf_overrides
    flat = {} if callable(overrides) else overrides or {}
    config = get_config(
        model,
        trust_remote_code=args.trust_remote_code,
        revision=args.revision,
        code_revision=args.code_revision,
        config_format=args.config_format,
        hf_overrides_kw={k: v for k, v in flat.items() if not isinstance(v, dict)},
        hf_overrides_fn=overrides if callable(overrides) else None,
    )
    return tuple(getattr(config, "architectures", None) or ())


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
