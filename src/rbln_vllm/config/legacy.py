# SPDX-License-Identifier: Apache-2.0
"""Old names of options: environment variables and dict keys, both removed in 0.14.0.

Pure functions; each returns the merged values and the warnings to log.
"""

from collections.abc import Mapping
from typing import Any

from rbln_vllm.config.options import flag_of
from rbln_vllm.config.schema import CONFIG_CLASSES, ModelImpl

Values = dict[str, Any]
Warnings = tuple[str, ...]

LEGACY_KEYS = {"rbln_config": "optimum_overrides", "prefix_block_size": "sub_block_size"}


def rename_legacy_keys(given: Mapping[str, Any], impl: ModelImpl) -> tuple[Values, Warnings]:
    """Replaces the old `additional_config` keys of the transformers implementation.

    Raises ValueError if an old key and its new name are both given.
    """
    values = dict(given)
    if impl != "transformers":
        return values, ()
    warnings = []
    for old, new in LEGACY_KEYS.items():
        if old not in values:
            continue
        if new in values:
            raise ValueError(f"additional_config has both {old!r} and its new name {new!r}")
        values[new] = values.pop(old)
        warnings.append(
            f"additional_config key {old!r} is deprecated and removed in 0.14.0: use {new!r}"
        )
    return values, tuple(warnings)


def merge_deprecated(
    given: Mapping[str, Any],
    deprecated: Mapping[str, tuple[str, Any]],
    impl: ModelImpl,
) -> tuple[Values, Warnings]:
    """Lays `given` over the deprecated variables (field -> (variable, value)).

    A field in both keeps the value of `given`, with a warning.
    """
    if not deprecated:
        return dict(given), ()
    fields = CONFIG_CLASSES[impl].model_fields
    warnings = [_deprecation_text(deprecated, impl)]
    values = {}
    for field, (variable, value) in deprecated.items():
        if field not in fields:
            continue
        values[field] = value
        if field in given:
            warnings.append(
                f"{field} is set in the RBLN config ({given[field]!r}) and by {variable} "
                f"({value!r}): the config wins. Unset {variable}"
            )
    return values | dict(given), tuple(warnings)


def _deprecation_text(deprecated: Mapping[str, tuple[str, Any]], impl: ModelImpl) -> str:
    fields = CONFIG_CLASSES[impl].model_fields
    uses = (
        f"{variable} -> {flag_of(field)}"
        + ("" if field in fields else f" (ignored by the {impl} implementation)")
        for field, (variable, _) in deprecated.items()
    )
    return f"Deprecated environment variables, removed in 0.14.0: {', '.join(uses)}"
