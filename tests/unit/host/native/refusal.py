# SPDX-License-Identifier: Apache-2.0
"""What a refused command must say."""

import pytest

from tests.unit.host.native.commands import CommandSpec


def refuse(spec: CommandSpec, message: str) -> None:
    """No program is built of the command; the error names the operator and says why."""
    with pytest.raises(ValueError, match=f"^{spec.op}: .*{message}"):
        spec.program()
