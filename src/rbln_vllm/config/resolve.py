# SPDX-License-Identifier: Apache-2.0
"""From what the user passed as `additional_config` to one frozen config object.

Command line flags write the same flat dict (`flags.py`), so there are two inputs: a dict or an
object. The result goes back into `VllmConfig.additional_config`: it is picklable, offers
`compute_hash`, and resolving it again (each engine process does) returns it unchanged.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rbln_vllm import envs
from rbln_vllm.config.legacy import merge_deprecated, rename_legacy_keys
from rbln_vllm.config.schema import (
    CONFIG_CLASSES,
    ModelImpl,
    OptimumRBLNConfig,
    RBLNConfig,
    RBLNConfigBase,
    implementations_of,
)
from rbln_vllm.devices import DeviceProfile

# vLLM only shows loggers below its own name.
logger = logging.getLogger("vllm.rbln.config")

AnyRBLNConfig = RBLNConfig | OptimumRBLNConfig


@dataclass(frozen=True)
class Resolution:
    """A resolved config and what to tell the user about how it came to be."""

    config: AnyRBLNConfig
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """The start-up log line."""
        changed = self.config.changed_values()
        return f"RBLN config: {changed if changed else 'all defaults'}"


def resolve_config(
    additional_config: object, impl: ModelImpl, profile: DeviceProfile
) -> AnyRBLNConfig:
    """Resolves with the deprecated variables of the environment, and logs the outcome.

    Raises ValueError as `resolve` does, and for a deprecated variable that does not parse.
    """
    if isinstance(additional_config, RBLNConfigBase) and additional_config.is_resolved:
        return resolve(additional_config, impl, profile).config
    resolution = resolve(additional_config, impl, profile, envs.deprecated_values())
    for warning in resolution.warnings:
        _warn_once(warning)
    logger.info("%s", resolution.summary())
    return resolution.config


def resolve(
    additional_config: object,
    impl: ModelImpl,
    profile: DeviceProfile,
    deprecated: Mapping[str, tuple[str, Any]] | None = None,
) -> Resolution:
    """Merges and validates; per field: `additional_config`, then `deprecated`, then the default.

    Raises ValueError for anything but a dict or a config of the selected implementation, for
    unknown fields, fields of the other implementation, values out of range (pydantic's
    ValidationError is a ValueError), values not built yet, and an implementation the device
    cannot run.
    """
    if impl not in profile.implementations:
        raise ValueError(f"the {impl} implementation does not run on {profile.name}")
    cls = CONFIG_CLASSES[impl]
    if isinstance(additional_config, cls) and additional_config.is_resolved:
        return Resolution(additional_config)
    given, key_warnings = rename_legacy_keys(_given_values(additional_config, cls), impl)
    _check_known(given, impl)
    values, merge_warnings = merge_deprecated(given, deprecated or {}, impl)
    config = cls(**values).as_resolved()
    return Resolution(config, key_warnings + merge_warnings + _doubts(config))


def _given_values(additional_config: object, cls: type[RBLNConfigBase]) -> Mapping[str, Any]:
    """The fields the user gave, whichever way."""
    if additional_config is None:
        return {}
    if isinstance(additional_config, cls):
        fields = additional_config.model_fields_set
        return {name: getattr(additional_config, name) for name in sorted(fields)}
    if not isinstance(additional_config, Mapping):
        raise ValueError(
            f"additional_config must be a {cls.__name__} or a mapping of its fields, not "
            f"{type(additional_config).__name__}"
        )
    return additional_config


def _check_known(given: Mapping[str, Any], impl: ModelImpl) -> None:
    known = CONFIG_CLASSES[impl].model_fields
    unknown = [name for name in given if name not in known]
    foreign = [name for name in unknown if implementations_of(name)]
    if foreign:
        owner = implementations_of(foreign[0])[0]
        raise ValueError(
            f"option(s) {', '.join(foreign)} belong to the {owner} implementation, but {impl} is "
            f"selected: remove them or pass --model-impl {owner}"
        )
    if unknown:
        raise ValueError(
            f"additional_config has unknown field(s) {', '.join(map(str, unknown))}: "
            f"{CONFIG_CLASSES[impl].__name__} knows {', '.join(known)}"
        )


def _doubts(config: AnyRBLNConfig) -> tuple[str, ...]:
    """Warnings about values that are valid but cannot have the effect they seem to ask for."""
    if not isinstance(config, RBLNConfig) or config.decode_batch_bucket_strategy == "manual":
        return ()
    if not config.decode_batch_bucket_manual_buckets:
        return ()
    return (
        "decode_batch_bucket_manual_buckets is ignored with strategy "
        f"{config.decode_batch_bucket_strategy!r}: add --rbln-decode-batch-bucket-strategy manual",
    )


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
