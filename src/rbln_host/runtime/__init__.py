# SPDX-License-Identifier: Apache-2.0
"""Running artifacts: executables, the native and the reference executor."""
