# SPDX-License-Identifier: Apache-2.0
"""The open toolchain: compiles and runs static-shape programs on any CPU."""

__version__ = "0.1.0"
