# SPDX-License-Identifier: Apache-2.0
"""Plain text tables."""

from collections.abc import Sequence


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks apart; numbers stand to the right."""
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = [_line(row, widths, right) for row in (titles, *rows)]
    return "\n".join(lines)


def byte_size(size: float) -> str:
    """``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    placed = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(placed).rstrip()


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() and cell.partition(" ")[0].replace(".", "", 1).isdigit()
