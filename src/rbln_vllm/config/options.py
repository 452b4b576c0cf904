# SPDX-License-Identifier: Apache-2.0
"""What is known about one option besides its type: read by flags, checks, hashes and documents."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

FLAG_PREFIX = "--rbln-"


@dataclass(frozen=True)
class Option:
    """Metadata of a config field, placed in its `Annotated` type.

    effect: what it does, one sentence.
    hashed: False if it cannot change a compiled program, so the cache key leaves it out.
    unbuilt: why only `accepted` values (None = just the default) are taken so far; "" = built.
    note: a reservation that needs no refusal.
    flag: False for fields the plugin derives itself, which have no command line flag.
    """

    effect: str
    hashed: bool = True
    unbuilt: str = ""
    accepted: tuple[object, ...] | None = None
    note: str = ""
    flag: bool = True

    def __post_init__(self) -> None:
        if self.accepted is not None and not self.unbuilt:
            raise ValueError("`accepted` only narrows an option that is not built")

    def refuses(self, value: object, default: object) -> bool:
        """True if `value` asks for something that is not built."""
        if not self.unbuilt:
            return False
        return value not in (self.accepted if self.accepted is not None else (default,))


def option_of(info: FieldInfo) -> Option:
    """The metadata of a field; every config field has exactly one `Option`."""
    (option,) = (item for item in info.metadata if isinstance(item, Option))
    return option


def default_of(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def flag_of(name: str) -> str:
    """`use_w8a8` -> `--rbln-use-w8a8`."""
    return FLAG_PREFIX + name.replace("_", "-")


def check_built(config: BaseModel) -> None:
    """Raises ValueError for the first field that asks for something not built yet."""
    for name, info in type(config).model_fields.items():
        option, default = option_of(info), default_of(info)
        value = getattr(config, name)
        if option.refuses(value, default):
            accepted = option.accepted if option.accepted is not None else (default,)
            values = " or ".join(repr(item) for item in accepted)
            raise ValueError(
                f"{name}={value!r} is not available: {option.unbuilt}. Leave {flag_of(name)} at "
                f"{values}"
            )
