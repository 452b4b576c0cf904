# SPDX-License-Identifier: Apache-2.0
"""Running artifacts: devices, executables, the reference executor."""
