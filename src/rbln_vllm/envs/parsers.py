# SPDX-License-Identifier: Apache-2.0
"""Parsers of environment variable texts. Each raises ValueError that says what it expected."""

GIB = 1 << 30
ISA_NAMES = ("portable", "avx2", "avx512", "avx512_bf16")
"""Instruction sets that the native kernels are compiled for."""


def parse_bool(text: str) -> bool:
    """`true` and `1` (any case) are True, anything else is False: the vendor's rule."""
    return text.strip().lower() in ("true", "1")


def parse_text(text: str) -> str:
    return text.strip()


def parse_optional_text(text: str) -> str | None:
    return text.strip() or None


def parse_count(text: str) -> int:
    """A whole number >= 0."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None
    if value < 0:
        raise ValueError("expected a whole number >= 0")
    return value


def parse_optional_int(text: str) -> int | None:
    """An int; empty means None."""
    if not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def parse_int_list(text: str) -> tuple[int, ...]:
    """Comma separated ints; empty items are skipped."""
    try:
        return tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        raise ValueError("expected whole numbers separated by commas") from None


def parse_bucket_strategy(text: str) -> str:
    """The strategy name; the old spelling `exp` means `exponential`."""
    name = text.strip().lower()
    return "exponential" if name == "exp" else name


def parse_gib(text: str) -> int | None:
    """GiB (fractions allowed) to bytes; empty or 0 means None (size it from free memory)."""
    try:
        gib = float(text.strip() or 0)
    except ValueError:
        raise ValueError("expected a number of GiB, for example 4 or 0.5") from None
    if not 0 <= gib < float("inf"):
        raise ValueError("expected a number of GiB >= 0, for example 4 or 0.5")
    return int(gib * GIB) or None


def parse_executor(text: str) -> str:
    """`native` or `reference`; empty means `native`."""
    name = text.strip().lower() or "native"
    if name not in ("native", "reference"):
        raise ValueError("expected native or reference")
    return name


def parse_isa(text: str) -> str | None:
    """An instruction set of the native kernels; empty means the best of this CPU."""
    name = text.strip().lower()
    if name and name not in ISA_NAMES:
        raise ValueError(f"expected one of {', '.join(ISA_NAMES)}")
    return name or None
