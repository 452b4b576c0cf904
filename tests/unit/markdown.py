# SPDX-License-Identifier: Apache-2.0
"""What generated pages have in common."""

import re


def assert_rows_fit(page: str) -> None:
    """Every row of a table has the columns of its header."""
    width = 0
    for line in page.splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        columns = len(re.findall(r"(?<!\\)\|", line))
        width = width or columns
        assert columns == width, line
