# SPDX-License-Identifier: Apache-2.0
"""`--rbln-*` command line flags for every option of both implementations.

vLLM keeps only the fields of its own `EngineArgs` of what is parsed, so a flag writes its value
into `additional_config`, flat (`{"<field>": value}`), exactly as a user's dict would. A flag that
is not given writes nothing.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rbln_vllm.config.options import Option, default_of, flag_of, option_of
from rbln_vllm.config.schema import CONFIG_CLASSES, implementations_of
from rbln_vllm.devices import DeviceProfile

GROUP_TITLE = "RBLNConfig"
_DEST = "additional_config"


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, nested dicts too. Neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


class _FlagAction(argparse.Action):
    """Writes the value of a flag into `additional_config`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        _store(self, namespace, self.dest.removeprefix("rbln_"), values)


class _IntListAction(_FlagAction):
    """Flattens `1,2 4` (comma lists, spaces or both) into one list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flat = [number for numbers in values for number in numbers]
        super().__call__(parser, namespace, flat, option_string)


class _BoolAction(argparse.BooleanOptionalAction):
    """`--rbln-x` and `--no-rbln-x`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = not (option_string or "").startswith("--no-")
        _store(self, namespace, self.dest.removeprefix("rbln_"), value)


class _MergeAction(argparse.Action):
    """`--additional-config` that is laid over what was parsed before it, not put in its place."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        present = getattr(namespace, _DEST, None)
        # Anything but a dict is passed on as it is: `resolve` refuses it in words.
        if isinstance(present, dict) and isinstance(values, dict):
            values = merge(present, values)
        setattr(namespace, _DEST, values)


def _store(action: argparse.Action, namespace: argparse.Namespace, field: str, value: Any) -> None:
    present = getattr(namespace, _DEST, None)
    if present is not None and not isinstance(present, dict):
        raise argparse.ArgumentError(
            action,
            f"cannot be added to --additional-config {present!r}, which is not a JSON object",
        )
    # The parser's default dict is shared by every parse, so it is never written to.
    setattr(namespace, _DEST, merge(present or {}, {field: value}))


def add_flags(parser: argparse.ArgumentParser, profile: DeviceProfile | None = None) -> None:
    """Registers the flags on vLLM's parser; a second call changes nothing.

    The group's title is what `vllm serve --help=rblnconfig` looks for. With a `profile`, vLLM's
    own arguments show that device's defaults.
    """
    if any(group.title == GROUP_TITLE for group in parser._action_groups):
        return
    group = parser.add_argument_group(
        GROUP_TITLE, "Options of the RBLN plugin, for both model implementations."
    )
    for name, info in flagged_fields():
        group.add_argument(
            flag_of(name),
            dest=f"rbln_{name}",
            default=argparse.SUPPRESS,
            help=_help(name, info),
            **_parsing(info),
        )
    _adapt_upstream(parser, profile)


def flagged_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every field with a flag, those of both implementations once."""
    seen: set[str] = set()
    for cls in CONFIG_CLASSES.values():
        for name, info in cls.model_fields.items():
            if name not in seen and option_of(info).flag:
                seen.add(name)
                yield name, info


def _adapt_upstream(parser: argparse.ArgumentParser, profile: DeviceProfile | None) -> None:
    actions = parser._option_string_actions
    if (config := actions.get("--additional-config")) is not None:
        config.__class__ = _MergeAction
    if (block_size := actions.get("--block-size")) is not None:
        block_size.choices = None
    device = actions.get("--device")
    if device is not None and device.choices is not None and "rbln" not in device.choices:
        device.choices = [*device.choices, "rbln"]
    utilization = actions.get("--gpu-memory-utilization")
    if utilization is not None and profile is not None:
        utilization.default = profile.default_gpu_memory_utilization


def _parsing(info: FieldInfo) -> dict[str, Any]:
    """The argparse arguments for a field's type."""
    plain, optional = plain_type(info.annotation)
    if plain is bool:
        return {"action": _BoolAction}
    if get_origin(plain) is Literal:
        return {"action": _FlagAction, "type": str, "choices": list(get_args(plain))}
    if get_origin(plain) is tuple:
        return {"action": _IntListAction, "type": int_list, "nargs": "+", "metavar": "N,N"}
    if plain is dict or get_origin(plain) is dict:
        return {"action": _FlagAction, "type": json_object, "metavar": "JSON"}
    if plain is int:
        return {
            "action": _FlagAction,
            "type": _optional_int if optional else int,
            "metavar": "N",
        }
    raise TypeError(f"no flag can parse {info.annotation!r}")


def plain_type(annotation: Any) -> tuple[Any, bool]:
    """(the type without Annotated and None, whether None is allowed)."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        (member,) = (arg for arg in get_args(annotation) if arg is not NoneType)
        return plain_type(member)[0], True
    return annotation, False


def _help(name: str, info: FieldInfo) -> str:
    option = option_of(info)
    owners = implementations_of(name)
    only = "" if len(owners) > 1 else f" Only with --model-impl {owners[0]}."
    reservation = _reservation(option)
    text = f"{option.effect}{only}{reservation} (default: {default_of(info)!r})"
    return text.replace("%", "%%")


def _reservation(option: Option) -> str:
    if option.unbuilt:
        return f" Unavailable: {option.unbuilt}."
    return f" Note: {option.note}." if option.note else ""


def int_list(text: str) -> Sequence[int]:
    try:
        return [int(item) for item in text.split(",") if item.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,4") from None


def _optional_int(text: str) -> int | None:
    if text.strip().lower() in ("", "none"):
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number or none") from None


def json_object(text: str) -> dict[str, Any]:
    """The type of an argument that is a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
