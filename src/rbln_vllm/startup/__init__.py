# SPDX-License-Identifier: Apache-2.0
"""From arguments to a configuration that can be served: defaults, choices, refusals in words."""
