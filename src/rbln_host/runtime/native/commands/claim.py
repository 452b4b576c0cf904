# SPDX-License-Identifier: Apache-2.0
"""Which native command does the work of a program's command: one small function per operator.

Each raises :class:`Unclaimed`, with the reason, for what the kernels do not take; such a command
falls back to torch. What is refused here is what cannot be expressed; dtypes, strides and sizes
are checked by the kernels themselves.
"""

from collections.abc import Mapping

from rbln_host.compiler.graph import Command
from rbln_host.runtime.native.commands import (
    attention,
    copies,
    elementwise,
    experts,
    linear,
    lookup,
    norm,
    sampling,
)
from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand, Site, Unclaimed

_BUILDERS: Mapping[str, Builder] = {
    **linear.BUILDERS,
    **norm.BUILDERS,
    **attention.BUILDERS,
    **lookup.BUILDERS,
    **elementwise.BUILDERS,
    **copies.BUILDERS,
    **sampling.BUILDERS,
    **experts.BUILDERS,
}


def claim(command: Command, site: Site) -> tuple[NativeCommand, ...]:
    """The native commands that do the work of ``command``, in order; none when there is none to do.

    Raises Unclaimed.
    """
    build = _BUILDERS.get(command.operator)
    if build is None:
        raise Unclaimed("no kernel does this")
    commands = build(Call(command, site))
    return tuple(c for c in commands if all(o is None or o.size for o in c.operands[-1:]))
