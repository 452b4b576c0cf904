# SPDX-License-Identifier: Apache-2.0
"""The native executor: programs as kernels on our own threads, torch for what no kernel does."""

from rbln_host.runtime.native.extension import choose_isa, load_extension
from rbln_host.runtime.native.program import NativeProgram, NativeRuntime
from rbln_host.runtime.native.segments import Compiler
from rbln_host.runtime.options import ExecutorOptions

__all__ = ["NativeProgram", "NativeRuntime", "compiler_of", "start_runtime"]


def compiler_of(options: ExecutorOptions) -> Compiler:
    """Raises ExecutorError when the extension is missing or this CPU lacks what was asked for."""
    extension = load_extension()
    return Compiler(extension, choose_isa(extension.isa_levels(), options.isa))


def start_runtime(options: ExecutorOptions) -> NativeRuntime:
    """Start the threads. Raises ExecutorError as :func:`compiler_of` does."""
    compiler = compiler_of(options)
    pool = compiler.extension.Pool(options.pool_cpus, options.spin_us)
    return NativeRuntime(compiler, pool)
