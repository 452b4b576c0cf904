# SPDX-License-Identifier: Apache-2.0
"""Arguments of a command by the names of its operator's schema."""

from rbln_host.compiler.graph import Argument, Command
from rbln_host.compiler.operators import resolve


def arguments_of(command: Command) -> dict[str, Argument]:
    """Every argument by name, those that were not given with their default.

    An argument without a default that was not given is absent.
    """
    schema = resolve(command.operator, command.overload)._schema
    found = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    found.update(zip((a.name for a in schema.arguments), command.args, strict=False))
    found.update(command.kwargs)
    return found
